"""Whatever HTTP brings, the client raises one of our errors, and says whether to try again."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

import tasks.client
from apps.errors import (
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    RequestRefused,
    RequestTooLarge,
)
from apps.schema import RowResult
from tasks.client import InferenceClient, error_of_status, is_endpoint, patiently

ENDPOINT = "http://app.test"
Answer = Callable[[httpx.Request], httpx.Response]


def make_client(answer: Answer) -> InferenceClient:
    return InferenceClient(ENDPOINT, transport=httpx.MockTransport(answer))


def make_body(*ids: str) -> dict[str, Any]:
    return {"rows": [{"id": row_id, "prompt": "Hi\u2028"} for row_id in ids]}


def make_card(**overrides: Any) -> dict[str, Any]:
    card = {"id": "tiny", "created": 0, "revision": "r1", "engine": "simulated 1"}
    return {**card, "max_model_len": 512, "max_num_seqs": 8, **overrides}


def answer_json(content: Any, status: int = 200) -> Answer:
    return lambda _: httpx.Response(status, json=content)


def subclasses(cls: type[Exception]) -> Iterator[type[Exception]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from subclasses(subclass)


TIMEOUTS = list(subclasses(httpx.TimeoutException))
REQUEST_ERRORS = [error for error in subclasses(httpx.RequestError) if error not in TIMEOUTS]


def make_lines(*items: Any) -> bytes:
    return b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)


def answer_lines(*items: Any) -> Answer:
    return lambda _: httpx.Response(200, content=make_lines(*items))


async def ask(client: InferenceClient, *ids: str) -> list[RowResult]:
    return [result async for result in client.generate(make_body(*ids))]


async def test_results_are_given_back() -> None:
    sent: list[Any] = []
    lines = make_lines({"id": "b", "text": "x\u2028\x85y"}, {"heartbeat": True}, {"id": "a"})

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append((request.method, request.url.path, json.loads(request.content)))
        return httpx.Response(200, content=lines + make_lines({"done": True, "rows": 2}))

    async with make_client(answer) as client:
        first, second = await ask(client, "a", "b")
    assert (first.id, first.text, second.id) == ("b", "x\u2028\x85y", "a")
    assert sent == [("POST", "/generate", make_body("a", "b"))]


class Bytewise(httpx.AsyncByteStream):
    """Content that comes a byte at a time, and breaks off with an error if there is one."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self._content = content
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number in range(len(self._content)):
            yield self._content[number : number + 1]
        if self._error:
            raise self._error


async def test_lines_may_come_in_any_pieces() -> None:
    content = make_lines({"id": "a", "text": "Grüße\u2029"}, {"done": True, "rows": 1})
    async with make_client(lambda _: httpx.Response(200, stream=Bytewise(content))) as client:
        (result,) = await ask(client, "a")
    assert result.text == "Grüße\u2029"


@pytest.mark.parametrize(
    "error", [None, httpx.ReadError("reset"), httpx.RemoteProtocolError("closed")], ids=repr
)
async def test_what_came_before_a_break_is_kept(error: Exception | None) -> None:
    torn = make_lines({"id": "a", "text": "kept"}) + b'{"id": "b", "text": "torn'
    results: list[RowResult] = []

    async def collect(client: InferenceClient) -> None:
        async for result in client.generate(make_body("a", "b")):
            results.append(result)

    async with make_client(lambda _: httpx.Response(200, stream=Bytewise(torn, error))) as client:
        with pytest.raises(EngineUnavailable):
            await collect(client)
    assert [result.text for result in results] == ["kept"]


async def test_silence_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.client, "MAX_SILENCE_S", 0.01)

    class Silent(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

    async with make_client(lambda _: httpx.Response(200, stream=Silent())) as client:
        with pytest.raises(EngineTimeout):
            await ask(client, "a")


async def test_served_model_is_named() -> None:
    async with make_client(answer_json({"data": [make_card(id="gsm")]})) as client:
        card = await client.served_model()
    assert (card.id, card.revision, card.max_num_seqs) == ("gsm", "r1", 8)


@pytest.mark.parametrize("ids", [["a", "b", "c"], ["a", "a"], ["c"]])
async def test_answer_to_other_rows_is_refused(ids: list[str]) -> None:
    async with make_client(answer_lines(*({"id": row_id} for row_id in ids))) as client:
        with pytest.raises(EngineError, match="not asked for"):
            await ask(client, "a", "b")


@pytest.mark.parametrize("last", [{"done": True, "rows": 1}, {"heartbeat": True}], ids=["done", "heartbeat"])
async def test_missing_rows_are_noticed(last: dict[str, Any]) -> None:
    async with make_client(answer_lines({"id": "a"}, last)) as client:
        with pytest.raises(EngineUnavailable, match="1 rows to come"):
            await ask(client, "a", "b")


@pytest.mark.parametrize(
    "content",
    [
        b"\n",
        b"<html>Welcome</html>\n",
        b"null\n",
        b'{"id": "a"\n',
        b'{"text": "x"}\n',
        b"{}\n",
        b"\xff\xfe\n",
    ],
    ids=["empty", "html", "null", "cut-off", "no-id", "no-field", "binary"],
)
async def test_body_that_is_no_answer_is_an_engine_error(content: bytes) -> None:
    async with make_client(lambda _: httpx.Response(200, content=content)) as client:
        with pytest.raises(EngineError, match="not an answer"):
            await ask(client, "a")
        with pytest.raises(EngineError, match="not an answer"):
            await client.served_model()


@pytest.mark.parametrize("num_models", [0, 2])
async def test_app_serves_exactly_one_model(num_models: int) -> None:
    async with make_client(answer_json({"data": [make_card()] * num_models})) as client:
        with pytest.raises(EngineError, match=f"serves {num_models} models"):
            await client.served_model()


async def test_spoilt_encoding_is_an_engine_error() -> None:
    content = gzip.compress(b'{"results": []}')[:-12] + b"no checksum!"

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(content))

    async with make_client(answer) as client:
        with pytest.raises(EngineUnavailable, match="DecodingError"):
            await ask(client, "a")


@pytest.mark.parametrize("raised", TIMEOUTS)
async def test_httpx_timeouts_are_engine_timeouts(raised: type[Exception]) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise raised("too slow")

    async with make_client(answer) as client:
        with pytest.raises(EngineTimeout, match="too slow") as caught:
            await ask(client, "a")
    assert isinstance(caught.value.__cause__, raised)


@pytest.mark.parametrize("raised", REQUEST_ERRORS)
async def test_httpx_errors_are_engine_errors(raised: type[Exception]) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise raised("broken")

    async with make_client(answer) as client:
        with pytest.raises(EngineUnavailable, match="broken") as caught:
            await client.served_model()
    assert isinstance(caught.value.__cause__, raised)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (302, RequestRefused),
        (400, RequestRefused),
        (401, RequestRefused),
        (404, RequestRefused),
        (408, EngineTimeout),
        (409, RequestRefused),
        (413, RequestTooLarge),
        (422, RequestRefused),
        (429, EngineOverloaded),
        (500, EngineUnavailable),
        (502, EngineUnavailable),
        (503, EngineUnavailable),
        (504, EngineTimeout),
        (599, EngineUnavailable),
    ],
)
async def test_status_decides_the_error(status: int, expected: type[Exception]) -> None:
    async with make_client(lambda _: httpx.Response(status, text="why")) as client:
        with pytest.raises(expected, match=f"{status} from {ENDPOINT}/generate: why") as caught:
            await ask(client, "a")
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("headers", "retry_after_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "soon"}, 1.0),
        ({"Retry-After": "-5"}, 1.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        ({}, 1.0),
    ],
    ids=["seconds", "zero", "word", "negative", "date", "none"],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_read(status: int, headers: dict[str, str], retry_after_s: float) -> None:
    request = httpx.Request("POST", ENDPOINT)
    error = error_of_status(httpx.Response(status, headers=headers, request=request))
    assert isinstance(error, EngineOverloaded | EngineUnavailable)
    assert error.retry_after_s == retry_after_s


def make_call(*outcomes: Exception | str) -> tuple[Callable[[], Any], list[Exception | str]]:
    """A call with these outcomes, and those that are still to come."""
    left = list(outcomes)

    async def call() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return call, left


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were asked for; none of them pass."""
    asked: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        asked.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return asked


@pytest.mark.parametrize(
    "error",
    [EngineError("a"), EngineTimeout("b"), EngineOverloaded("c", 5.0), EngineUnavailable("d", 0.0)],
    ids=lambda error: type(error).__name__,
)
async def test_engine_errors_are_waited_out(error: EngineError) -> None:
    call, left = make_call(error, error, error, "answer", "too many")
    assert await patiently(call, patience_s=1000) == "answer"
    assert left == ["too many"]


@pytest.mark.parametrize("error", [RequestRefused("409"), ValueError("ours")], ids=["refused", "bug"])
async def test_other_errors_leave_at_once(error: Exception) -> None:
    call, left = make_call(error, "answer")
    with pytest.raises(type(error)) as caught:
        await patiently(call, patience_s=1000)
    assert caught.value is error
    assert left == ["answer"]


@pytest.mark.parametrize(
    ("url", "usable"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://app.example.com/base/", True),
        ("http://[::1]:8000", True),
        ("localhost:8000", False),
        ("http://localhost:99999", False),
        ("http://", False),
        ("s3://bucket/run", False),
    ],
)
def test_endpoint_is_recognised(url: str, usable: bool) -> None:
    assert is_endpoint(url) is usable


async def test_patience_runs_out() -> None:
    call, left = make_call(EngineTimeout("first"), "answer")
    with pytest.raises(EngineTimeout, match="first"):
        await patiently(call, patience_s=0)
    assert left == ["answer"]


async def test_wait_beyond_patience_is_not_begun() -> None:
    call, left = make_call(EngineUnavailable("starting", retry_after_s=60), "answer")
    with pytest.raises(EngineUnavailable):
        await patiently(call, patience_s=59)
    assert left == ["answer"]


async def test_full_app_is_given_more_patience() -> None:
    call, left = make_call(EngineOverloaded("full", retry_after_s=60), "answer")
    await patiently(call, patience_s=59)
    assert left == []


async def test_waits_are_as_long_as_asked(waits: list[float]) -> None:
    full = EngineOverloaded("full", retry_after_s=20)
    call, _ = make_call(full, full, full, "answer")
    await patiently(call, patience_s=1000)
    assert all(20 <= wait <= 60 for wait in waits)
    assert len(set(waits)) == 3, "each with jitter of its own"
