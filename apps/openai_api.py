"""OpenAI's routes for text: chat and plain completions, whole or as server-sent events.

A stream's status is sent with its first event, so that whatever fails before the first token is an HTTP
error; what fails later is an event with the error, and the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from itertools import product

from fastapi import APIRouter, Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from apps.admission import Admission
from apps.answer import SEND_TIMEOUT_S, wait_for_disconnect
from apps.error_body import Failure
from apps.errors import EngineOverloaded, EngineUnavailable
from apps.guard import BEARER
from apps.jobs import Ask, Job
from apps.openai_answers import ChatForm, Form, News, TextForm, usage_of
from apps.openai_requests import Asked, BaseRequest, ChatRequest, CompletionRequest, parse_request
from apps.openai_schema import documented_as
from apps.schema import RowResult

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

router = APIRouter(prefix="/v1", dependencies=[BEARER])


@router.post("/chat/completions", **documented_as(ChatRequest, ChatCompletion))
async def chat_completions(request: Request) -> Response:
    return await _respond(request, ChatRequest, ChatForm)


@router.post("/completions", **documented_as(CompletionRequest, Completion))
async def completions(request: Request) -> Response:
    return await _respond(request, CompletionRequest, TextForm)


async def _respond(
    request: Request, kind: type[BaseRequest], make_form: type[ChatForm] | type[TextForm]
) -> Response:
    state = request.app.state
    limits = state.engine.limits
    max_rows = min(state.settings.max_request_rows, state.settings.max_queue_size)
    try:
        asked = parse_request(kind, await request.body(), limits, max_rows)
        form = make_form(limits.model, include_usage=asked.include_usage)
        if asked.stream:
            return EventStream(asked, form, state.admission)
        results = await _finish(asked, state.admission, request.receive)
    except Failure as failure:
        return failure.response()
    except ClientDisconnect:
        return Response(status_code=499)
    answer = form.whole(results, usage_of(results, len(asked.samplings)))
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _finish(asked: Asked, admission: Admission, receive: Receive) -> list[RowResult]:
    """A result for each choice, in their order."""
    results: dict[int, RowResult] = {}
    async with aclosing(follow(asked, admission, receive)) as batches:
        async for batch in batches:
            results.update((news.index, news.result) for news in batch if news.result)
    return [results[index] for index in range(len(results))]


async def follow(asked: Asked, admission: Admission, receive: Receive) -> AsyncGenerator[list[News]]:
    """All that is new since the last yield, until every choice is finished. Text only for a stream.

    Choices count up by prompt, then by completion. A slow reader is given more at a time. However this
    ends, what is unfinished is aborted. Raises `Failure` when a choice failed or there is no place for
    them, `ClientDisconnect` when the client has left.
    """
    new_text: dict[int, list[str]] = {}
    """For each choice of which there is news."""
    wake = asyncio.Event()

    def note(index: int, text: str = "") -> None:
        new_text.setdefault(index, []).append(text)
        wake.set()

    def note_end(index: int, _: asyncio.Future[RowResult]) -> None:
        note(index)

    asks = [
        Ask(row, sampling, on_text=partial(note, index) if asked.stream else None)
        for index, (row, sampling) in enumerate(product(asked.rows, asked.samplings))
    ]
    jobs = _submit(asks, admission)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    gone.add_done_callback(lambda _: wake.set())
    try:
        for index, job in enumerate(jobs):
            job.done.add_done_callback(partial(note_end, index))
        unfinished = dict(enumerate(jobs))
        while unfinished:
            await wake.wait()
            wake.clear()
            if gone.done():
                raise ClientDisconnect
            pieces = {index: "".join(texts) for index, texts in new_text.items() if index in unfinished}
            new_text.clear()
            batch = [_news(index, text, unfinished[index]) for index, text in pieces.items()]
            for news in batch:
                if news.result:
                    del unfinished[news.index]
            yield batch
    finally:
        gone.cancel()
        for job in jobs:
            admission.leave(job)


def _submit(asks: list[Ask], admission: Admission) -> list[Job]:
    try:
        return admission.submit(asks, interactive=True)
    except (EngineOverloaded, EngineUnavailable) as exc:
        raise Failure.of_engine(exc) from exc


def _news(index: int, text: str, job: Job) -> News:
    result = job.done.result() if job.done.done() else None
    if result is not None and result.error_kind is not None:
        raise Failure.of_row(result)
    return News(index, text, result)


class EventStream(Response):
    """Server-sent events: a chunk for each piece of text, the usage if asked for, and `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, asked: Asked, form: Form, admission: Admission) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._asked = asked
        self._form = form
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with aclosing(self._events(receive)) as batches:
                async for events in batches:
                    if start:
                        await send(start)
                        start = {}
                    await _send(send, events)
            await _send(send, DONE, more=False)
        except Failure as failure:
            if start:
                await failure.response()(scope, receive, send)
            else:
                await _send(send, _event(failure.body()), more=False)
        except ClientDisconnect:
            logger.debug("the reader of a stream has left")
        except TimeoutError:
            logger.warning("a reader took nothing for %.0f s: its stream ends", SEND_TIMEOUT_S)

    async def _events(self, receive: Receive) -> AsyncGenerator[bytes]:
        results: dict[int, RowResult] = {}
        async with aclosing(follow(self._asked, self._admission, receive)) as batches:
            async for batch in batches:
                results.update((news.index, news.result) for news in batch if news.result)
                yield b"".join(_event(self._form.chunk(news)) for news in batch)
        if self._asked.include_usage:
            in_order = [results[index] for index in range(len(results))]
            yield _event(self._form.last_chunk(usage_of(in_order, len(self._asked.samplings))))


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(chunk: BaseModel) -> bytes:
    """ASCII, for clients that end lines wherever Unicode does."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True, ensure_ascii=True).encode() + b"\n\n"
