"""What the app asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from apps.schema import FinishReason, Row, SamplingParams


@dataclass(frozen=True)
class EngineLimits:
    """What is served, and how much of it fits at once; read from the engine after it started."""

    model: str
    model_revision: str
    engine: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int


@dataclass(frozen=True)
class RenderedPrompt:
    """A tokenised prompt. `payload` is the engine's own form of it."""

    num_tokens: int
    payload: object


@dataclass(frozen=True)
class Completion:
    """One finished answer; `ttft_s` counts seconds from the hand-over to the engine."""

    text: str
    finish_reason: FinishReason
    completion_tokens: int
    ttft_s: float | None


class Engine(Protocol):
    """Runs many prompts at once; how they share the hardware is the engine's own business.

    Raises, from both coroutines: `PromptError` if the prompt can never succeed, `EngineError` if
    it may succeed later, `EngineUnavailable` once the engine is dead for good.
    """

    @property
    def limits(self) -> EngineLimits: ...

    async def render(self, row: Row) -> RenderedPrompt:
        """Applies the chat template and tokenises."""

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Cancelling the awaiting task aborts the prompt in the engine.

        Of the prompts that wait inside the engine, those with a lower `priority` go first. `on_text` is
        called with each new piece of the text as it is made; joined, they are the completion's text.
        """

    async def check_health(self) -> None:
        """Raises `EngineUnavailable` if the engine is dead."""

    async def close(self) -> None: ...
