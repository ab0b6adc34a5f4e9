"""OpenAI's routes over HTTP, with OpenAI's own client, on the simulated engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.types import Message

import apps.openai_api
from apps.admission import Admission
from apps.engines.base import Completion, RenderedPrompt
from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineError
from apps.inference_app import create_app
from apps.openai_answers import ChatForm
from apps.openai_api import EventStream
from apps.openai_requests import ChatRequest, parse_request
from apps.schema import SamplingParams
from apps.settings import AppSettings
from tests.engines import HeldEngine, make_settings, until
from tests.loopback import serve

MESSAGES: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
CHAT = {"model": "sim", "messages": MESSAGES}
PIECES = ["One ", "pear\u2028", "and\x85", "é\0", "\U0001f350"]
"""With what Unicode calls the end of a line, and SSE does not."""


class ScriptedEngine(SimulatedEngine):
    """Says `pieces`, and before each waits for its turn; then raises `fault`, if there is one."""

    def __init__(
        self, settings: AppSettings, pieces: list[str] = PIECES, fault: Exception | None = None
    ) -> None:
        super().__init__(settings)
        self.turns = asyncio.Semaphore(0)
        self.aborted = 0
        self._pieces = pieces
        self._fault = fault

    def say(self, num_pieces: int) -> None:
        for _ in range(num_pieces):
            self.turns.release()

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        try:
            for piece in self._pieces:
                await self.turns.acquire()
                if on_text is not None:
                    on_text(piece)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self._fault is not None:
            raise self._fault
        return Completion("".join(self._pieces), "stop", len(self._pieces), ttft_s=None)


class UnluckyEngine(SimulatedEngine):
    """Fails every prompt with an even seed."""

    async def generate(self, prompt: RenderedPrompt, sampling: SamplingParams, **options: Any) -> Completion:
        if (sampling.seed or 0) % 2 == 0:
            raise EngineError("bad luck")
        return await super().generate(prompt, sampling, **options)


@dataclass
class Served:
    engine: Any
    client: AsyncOpenAI
    http: httpx.AsyncClient

    async def events(self, **body: Any) -> list[Any]:
        """Of a streamed chat, as any client of server-sent events sees them."""
        fields = {**CHAT, "stream": True, **body}
        async with self.http.stream("POST", "/v1/chat/completions", json=fields) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@asynccontextmanager
async def served(
    make_engine: Callable[[AppSettings], SimulatedEngine] = SimulatedEngine, **settings: Any
) -> AsyncIterator[Served]:
    app = create_app(make_engine, lambda: make_settings(**settings), on_dead=lambda: None)
    async with (
        serve(app) as endpoint,
        AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=endpoint) as http,
    ):
        yield Served(app.state.engine, client, http)


async def test_a_chat_is_answered() -> None:
    async with served() as app:
        answer = await app.client.chat.completions.create(model="sim", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content or "").startswith("Simulated completion")
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "sim")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens


async def test_a_text_is_completed() -> None:
    async with served() as app:
        answer = await app.client.completions.create(model="sim", prompt="One pear", max_tokens=3)
    (choice,) = answer.choices
    assert choice.text.startswith("Simulated completion")
    assert (choice.finish_reason, answer.object) == ("length", "text_completion")
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)


async def test_each_prompt_of_a_list_has_n_choices_in_turn() -> None:
    async with served() as app:
        create = app.client.completions.create
        both = await create(model="sim", prompt=["One", "Two"], n=2, seed=5)
        alone = await create(model="sim", prompt="Two", seed=6)
        tokens = await create(model="sim", prompt=[[1, 2, 3], [4]], seed=5)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) == 4
    assert both.choices[3].text == alone.choices[0].text
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (2, 4 * 16)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 4


async def test_a_streamed_chat_is_the_whole_one_in_pieces() -> None:
    async with served() as app:
        whole = await app.client.chat.completions.create(model="sim", messages=MESSAGES, n=3, seed=1)
        *chunks, last, done = await app.events(n=3, seed=1, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["delta"]["content"] for choice in mine)
        assert text == whole.choices[index].message.content
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert whole.usage is not None
    assert (last["choices"], last["usage"]) == ([], whole.usage.model_dump(exclude_unset=True))
    assert done == "[DONE]"


async def test_a_stream_says_nothing_of_usage_unasked() -> None:
    async with served() as app:
        *chunks, done = await app.events()
    assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)
    assert done == "[DONE]"


async def test_streams_are_what_the_client_expects() -> None:
    async with served() as app:
        create = app.client.completions.create
        whole = await create(model="sim", prompt=["One", "Two"], seed=1)
        stream = await create(
            model="sim", prompt=["One", "Two"], seed=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        chat_stream = await app.client.chat.completions.create(model="sim", messages=MESSAGES, stream=True)
        chat_chunks = [chunk async for chunk in chat_stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chat_chunks[-1].choices[0].finish_reason == "stop"


async def test_text_is_sent_as_it_is_made_and_not_before() -> None:
    async with served(ScriptedEngine) as app:
        create = app.client.chat.completions.create(model="sim", messages=MESSAGES, stream=True)
        opening = asyncio.create_task(create)
        await asyncio.sleep(0.1)
        assert not opening.done()
        app.engine.say(1)
        stream = await opening
        first = await anext(stream)
        app.engine.say(len(PIECES) - 1)
        rest = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", PIECES[0])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "".join(PIECES[1:])
    assert rest[-1].choices[0].delta.content
    assert rest[-1].choices[0].finish_reason == "stop"


async def test_any_text_survives_both_ways() -> None:
    async with served(ScriptedEngine) as app:
        app.engine.say(2 * len(PIECES))
        prompt: list[Any] = [{"role": "user", "content": "\0\u2028\x85é"}]
        whole = await app.client.chat.completions.create(model="sim", messages=prompt)
        *chunks, _ = await app.events(messages=prompt)
    assert whole.choices[0].message.content == "".join(PIECES)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "".join(PIECES)


async def test_another_model_is_not_found() -> None:
    async with served() as app:
        with pytest.raises(openai.NotFoundError) as caught:
            await app.client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_a_bad_request(stream: bool) -> None:
    async with served(max_model_len=50) as app:
        with pytest.raises(openai.BadRequestError) as caught:
            await app.client.completions.create(model="sim", prompt="pear " * 100, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "50" in caught.value.message


async def test_what_is_not_supported_is_a_bad_request() -> None:
    async with served() as app:
        with pytest.raises(openai.BadRequestError) as caught:
            await app.client.chat.completions.create(model="sim", messages=MESSAGES, logprobs=True)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_rate_limit(stream: bool) -> None:
    async with served(HeldEngine, max_num_seqs=1, max_queue_size=4) as app:
        create = app.client.chat.completions.create
        first = asyncio.create_task(create(model="sim", messages=MESSAGES, n=4))
        await until(lambda: app.engine.held == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await create(model="sim", messages=MESSAGES, n=3, stream=stream)
        app.engine.release.set()
        answered = await first
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    assert caught.value.code == "rate_limit_exceeded"
    assert len(answered.choices) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_a_server_error(stream: bool) -> None:
    async with served(simulated={"die_after": 0}) as app:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                await app.client.chat.completions.create(model="sim", messages=MESSAGES, stream=stream)
            assert caught.value.status_code == 503
            assert "Retry-After" in caught.value.response.headers


async def test_one_failed_choice_fails_the_request() -> None:
    async with served(UnluckyEngine) as app:
        create = app.client.chat.completions.create
        with pytest.raises(openai.InternalServerError, match="bad luck"):
            await create(model="sim", messages=MESSAGES, n=2, seed=1)
        assert (await create(model="sim", messages=MESSAGES, seed=1)).choices


async def test_a_stream_that_fails_ends_with_the_error() -> None:
    def make_engine(settings: AppSettings) -> ScriptedEngine:
        return ScriptedEngine(settings, fault=EngineError("bad luck"))

    async with served(make_engine) as app:
        reading = asyncio.create_task(app.events())
        app.engine.say(1)
        await asyncio.sleep(0.1)
        app.engine.say(len(PIECES))
        events = await reading
        stream = await app.client.chat.completions.create(model="sim", messages=MESSAGES, stream=True)
        app.engine.say(len(PIECES))
        with pytest.raises(openai.APIError, match="bad luck"):
            [chunk async for chunk in stream]
    expected = {"message": "bad luck", "type": "server_error", "param": None, "code": "engine_error"}
    assert events[-1] == {"error": expected}


async def test_a_client_that_leaves_aborts_its_choices() -> None:
    async with served(HeldEngine, max_num_seqs=2) as app:
        request = asyncio.create_task(app.client.chat.completions.create(model="sim", messages=MESSAGES, n=8))
        await until(lambda: app.engine.held == 4)
        request.cancel()
        await until(lambda: app.engine.aborted == 4)
        stats = (await app.http.get("/stats")).json()
    assert (stats["aborted"], stats["queued"]) == (8, 0)


async def test_a_reader_that_leaves_a_stream_aborts_it() -> None:
    async with served(ScriptedEngine) as app:
        app.engine.say(1)
        stream = await app.client.chat.completions.create(model="sim", messages=MESSAGES, stream=True)
        await anext(stream)
        await stream.close()
        await until(lambda: app.engine.aborted == 1)


async def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.openai_api, "SEND_TIMEOUT_S", 0.3)

    def make_engine(settings: AppSettings) -> ScriptedEngine:
        return ScriptedEngine(settings, ["x" * 1_000_000] * 1000)

    async with served(make_engine) as app:
        body = json.dumps({**CHAT, "stream": True}).encode()
        with socket.create_connection((app.http.base_url.host, app.http.base_url.port or 0)) as idle:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            idle.sendall(head.encode() + body)
            while not app.engine.aborted:
                app.engine.say(1)
                assert (await app.http.get("/health")).status_code == 200


async def test_a_slow_reader_is_given_more_at_a_time() -> None:
    settings = make_settings()
    engine = ScriptedEngine(settings, ["x"] * 100)
    asked = parse_request(ChatRequest, json.dumps({**CHAT, "stream": True}).encode(), engine.limits, 1)
    bodies: list[bytes] = []
    reading = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            await reading.wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with Admission(engine, settings) as admission:
        form = ChatForm("sim", include_usage=False)
        stream = asyncio.create_task(EventStream(asked, form, admission)({}, receive, send))
        engine.say(1)
        await until(lambda: bodies)
        engine.say(99)
        await until(lambda: not admission.rows)
        reading.set()
        await stream
    await engine.close()
    contents = [
        json.loads(body.removeprefix(b"data: "))["choices"][0]["delta"]["content"] for body in bodies[:-1]
    ]
    assert contents == ["x", "x" * 99]
    assert bodies[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"a"', b"[" * 10**6, b'{"model": "\\ud800"}', b"\xff"],
    ids=lambda b: repr(b[:20]),
)
async def test_a_body_that_is_no_json_object_is_a_bad_request(route: str, body: bytes) -> None:
    async with served() as app:
        response = await app.http.post(route, content=body)
    assert response.status_code == 400
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_many_streams_share_the_engine() -> None:
    slow = {"time_scale": 0.01}
    async with served(simulated=slow, max_num_seqs=16) as app:
        streams = [app.events(messages=[{"role": "user", "content": f"{n}"}]) for n in range(100)]
        events = await asyncio.gather(*streams)
    texts = {"".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) for *chunks, _ in events}
    assert len(texts) == 100
