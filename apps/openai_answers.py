"""What OpenAI's routes answer, in the `openai` package's own types. Importing it takes seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from apps.schema import FinishReason, RowResult


@dataclass(frozen=True)
class News:
    """Of one choice: the text that is new, and the result once it is finished."""

    index: int
    text: str
    result: RowResult | None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.result.finish_reason if self.result else None


class Form(Protocol):
    """The answer to one request: whole, or in chunks. Choices are in the order of `results`."""

    def whole(self, results: Sequence[RowResult], usage: CompletionUsage) -> BaseModel: ...

    def chunk(self, news: News) -> BaseModel: ...

    def last_chunk(self, usage: CompletionUsage) -> BaseModel:
        """Without a choice."""


class ChatForm:
    """Obeys `Form`."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._chunk_head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        if include_usage:
            self._chunk_head["usage"] = None
        self._begun: set[int] = set()
        """Choices whose role has been sent."""

    def whole(self, results: Sequence[RowResult], usage: CompletionUsage) -> ChatCompletion:
        choices = [
            Choice(
                index=index,
                message=ChatCompletionMessage(role="assistant", content=result.text),
                finish_reason=result.finish_reason or "stop",
                logprobs=None,
            )
            for index, result in enumerate(results)
        ]
        return ChatCompletion(**self._head, object="chat.completion", choices=choices, usage=usage)

    def chunk(self, news: News) -> ChatCompletionChunk:
        delta = ChoiceDelta(content=news.text)
        if news.index not in self._begun:
            self._begun.add(news.index)
            delta.role = "assistant"
        choice = ChunkChoice(index=news.index, delta=delta, finish_reason=news.finish_reason)
        return ChatCompletionChunk(**self._chunk_head, choices=[choice])

    def last_chunk(self, usage: CompletionUsage) -> ChatCompletionChunk:
        return ChatCompletionChunk(**{**self._chunk_head, "usage": usage}, choices=[])


class TextForm:
    """Obeys `Form`. Chunks are copies, for OpenAI sends a null `finish_reason` that its type forbids."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        head = {"id": f"cmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._whole = Completion(**head, object="text_completion", choices=[])
        self._chunk = self._whole.model_copy(update={"usage": None} if include_usage else None)
        self._choice = CompletionChoice(index=0, text="", finish_reason="stop", logprobs=None)

    def whole(self, results: Sequence[RowResult], usage: CompletionUsage) -> Completion:
        choices = [
            CompletionChoice(
                index=index,
                text=result.text or "",
                finish_reason=result.finish_reason or "stop",
                logprobs=None,
            )
            for index, result in enumerate(results)
        ]
        return self._whole.model_copy(update={"choices": choices, "usage": usage})

    def chunk(self, news: News) -> Completion:
        changes = {"index": news.index, "text": news.text, "finish_reason": news.finish_reason}
        return self._chunk.model_copy(update={"choices": [self._choice.model_copy(update=changes)]})

    def last_chunk(self, usage: CompletionUsage) -> Completion:
        return self._chunk.model_copy(update={"usage": usage})


def usage_of(results: Sequence[RowResult], n: int) -> CompletionUsage:
    """Of `n` completions for each prompt in turn: a prompt counts once."""
    prompt_tokens = sum(result.prompt_tokens for result in results[::n])
    completion_tokens = sum(result.completion_tokens for result in results)
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
