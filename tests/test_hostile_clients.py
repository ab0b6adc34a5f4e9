"""Clients over a real socket that do what no client should: what they cost the app, and others."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import psutil
import pytest

import apps.answer
import apps.guard
from apps.engines.base import Completion, Engine, RenderedPrompt
from apps.engines.simulated import SimulatedEngine
from apps.inference_app import create_app
from apps.schema import NDJSON, SamplingParams
from apps.settings import AppSettings
from tasks.client import InferenceClient
from tests.engines import HeldEngine, make_body, make_settings, until
from tests.loopback import serve

ODD = "a\0b \u2028 \u2029 \x85 \x1e \ufeff \U0001f350 \r\n\t"
"""NUL, every line end that Unicode knows, a byte order mark."""


@dataclass
class Served:
    endpoint: str
    client: httpx.AsyncClient
    engine: Engine

    async def stats(self) -> dict[str, Any]:
        current: dict[str, Any] = (await self.client.get("/stats")).json()
        return current

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = httpx.URL(self.endpoint)
        return await asyncio.open_connection(url.host, url.port, limit=2**16)

    async def still_answers(self) -> bool:
        response = await self.client.post("/generate", json=make_body(3))
        return [result["error_kind"] for result in response.json()["results"]] == [None] * 3


@asynccontextmanager
async def served(
    make_engine: Callable[[AppSettings], Engine] = SimulatedEngine, **settings: Any
) -> AsyncIterator[Served]:
    app = create_app(make_engine, lambda: make_settings(**settings), on_dead=lambda: None)
    async with serve(app) as endpoint, httpx.AsyncClient(base_url=endpoint, timeout=60) as client:
        yield Served(endpoint, client, app.state.engine)


def head(num_bytes: int, *lines: str) -> bytes:
    first = "POST /generate HTTP/1.1", "Host: app", "Content-Type: application/json"
    return "\r\n".join([*first, f"Content-Length: {num_bytes}", *lines, "", ""]).encode()


class Echo(SimulatedEngine):
    """Answers with the prompt."""

    async def generate(self, prompt: RenderedPrompt, sampling: SamplingParams, **_: Any) -> Completion:
        return Completion(json.loads(cast(str, prompt.payload))["prompt"], "stop", 1, 0.0)


async def test_an_overload_is_met_with_200_and_429_alone() -> None:
    """Ten times the clients that the queue has room for, over and over, and none of them patient."""
    engine = {"time_scale": 1.0, "step_overhead_s": 0.002, "weights_gb": 0.0, "mean_completion_tokens": 5.0}
    async with served(max_num_seqs=8, max_queue_size=100, simulated=engine) as app:
        await app.still_answers()
        memory = psutil.Process().memory_info().rss
        statuses: list[int] = []

        async def insist(number: int) -> None:
            for attempt in range(3):
                body = make_body(10, task_id=f"{number} {attempt}")
                response = await app.client.post("/generate", json=body)
                statuses.append(response.status_code)
                if response.status_code == 200:
                    results = response.json()["results"]
                    assert [result["id"] for result in results] == [str(n) for n in range(10)]
                    assert not any(result["error_kind"] for result in results)
                else:
                    assert int(response.headers["Retry-After"]) >= 1

        await asyncio.gather(*(insist(number) for number in range(100)))
        stats = await app.stats()
    assert set(statuses) == {200, 429}
    assert stats["rejected"] == 10 * statuses.count(429)
    assert stats["completed"] == 10 * statuses.count(200) + 3
    assert psutil.Process().memory_info().rss - memory < 100_000_000


@pytest.mark.parametrize("accept", [NDJSON, "application/json"])
async def test_odd_characters_come_back_as_they_went(accept: str) -> None:
    body = {"rows": [{"id": f"id {ODD}", "prompt": ODD}]}
    async with served(Echo) as app, InferenceClient(app.endpoint) as client:
        response = await app.client.post("/generate", json=body, headers={"Accept": accept})
        streamed = [result async for result in client.generate(body)]
    first = json.loads(response.content.split(b"\n")[0])
    result = first["results"][0] if "results" in first else first
    assert (result["id"], result["text"], result["error_kind"]) == (f"id {ODD}", ODD, None)
    assert [(result.id, result.text) for result in streamed] == [(f"id {ODD}", ODD)]


DEEP = "[" * 100_000 + "]" * 100_000
DEEP_ENOUGH = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 422, id="nothing"),
        pytest.param(b'{"rows": [{"id": "0", "prompt": "a"}', 422, id="malformed"),
        pytest.param(b"\xff\xfe{}", 422, id="not UTF-8"),
        pytest.param(DEEP.encode(), 400, id="deep"),
        pytest.param(b'{"rows": ' + DEEP.encode() + b"}", 400, id="deep rows"),
        pytest.param(b'{"rows": [], "sampling": ' + DEEP_ENOUGH.encode() + b"}", 422, id="deep sampling"),
        pytest.param(
            b'{"rows": [{"id": "0", "prompt": "a"}], "deadline_s": 1e999}', 422, id="infinite deadline"
        ),
        pytest.param(b'{"rows": [{"id": "0", "prompt": "a"}], "deadline_s": NaN}', 422, id="no deadline"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes, status: int) -> None:
    async with served() as app:
        headers = {"Content-Type": "application/json"}
        response = await app.client.post("/generate", content=body, headers=headers)
        assert response.status_code == status
        assert len(response.json()["error"]["message"]) < 300
        assert await app.still_answers()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param('"prompt": ' + DEEP_ENOUGH, id="deep prompt"),
        pytest.param('"prompt": "a", "sampling": {"temperature": ' + DEEP_ENOUGH + "}", id="deep sampling"),
        pytest.param('"prompt": "a", "' + "k" * 1000 + '": ' + DEEP_ENOUGH, id="deep unknown field"),
        pytest.param('"messages": [{"role": "user", "content": ' + DEEP_ENOUGH + "}]", id="deep content"),
        pytest.param(
            '"prompt": "a", "sampling": {"structured_outputs": {"json": {"a": ' + DEEP_ENOUGH + "}}}",
            id="deep schema",
        ),
        pytest.param('"prompt": "a\\ud800"', id="lone surrogate"),
        pytest.param('"messages": [{"role": "\\udfff", "content": "a"}]', id="lone surrogate as role"),
        pytest.param('"prompt": "a", "sampling": {"stop": ["\\ud800"]}', id="lone surrogate as stop"),
        pytest.param('"prompt": "a", "sampling": {"\\ud800": 1}', id="lone surrogate as key"),
        pytest.param('"prompt": "a", "sampling": {"temperature": NaN}', id="NaN"),
        pytest.param('"prompt": "a", "sampling": {"seed": 1' + "0" * 4000 + "}", id="huge number"),
    ],
)
async def test_a_poisoned_row_is_refused_alone(row: str) -> None:
    body = '{"rows": [{"id": "good", "prompt": "a"}, {"id": "bad", ' + row + "}]}"
    async with served() as app:
        headers = {"Content-Type": "application/json"}
        response = await app.client.post("/generate", content=body.encode(), headers=headers)
        good, bad = response.json()["results"]
    assert good["error_kind"] is None
    assert bad["error_kind"] in ("invalid_prompt", "invalid_sampling", "invalid_schema")
    assert 0 < len(bad["error"]) < 300


async def test_a_reader_that_stops_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apps.answer, "SEND_TIMEOUT_S", 0.5)
    rows = [{"id": str(n), "prompt": "a" * 50_000} for n in range(200)]
    content = json.dumps({"rows": rows})
    async with served(Echo, max_model_len=100_000, max_request_bytes=20_000_000) as app:
        reader, writer = await app.connect()
        writer.write(head(len(content), f"Accept: {NDJSON}") + content.encode())
        await reader.readline()
        assert await app.still_answers()
        await until(lambda: "took nothing" in caplog.text)
        while await reader.read(2**16):
            pass
        writer.close()


async def until_stats(app: Served, **expected: int) -> None:
    while not expected.items() <= (await app.stats()).items():  # noqa: ASYNC110  # over HTTP
        await asyncio.sleep(0.01)


async def test_rows_of_a_reader_that_stopped_end_at_the_deadline() -> None:
    async with served(HeldEngine, max_num_seqs=64, max_model_len=100_000) as app:
        body = make_body(50, deadline_s=0.5)
        body["rows"] = [{"id": "x" * 100_000 + str(n), "prompt": None} for n in range(30)] + body["rows"]
        content = json.dumps(body)
        _, writer = await app.connect()
        writer.write(head(len(content), f"Accept: {NDJSON}") + content.encode())
        await until_stats(app, aborted=50, in_flight=0)
        writer.close()


async def test_half_a_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.guard, "BODY_TIMEOUT_S", 0.3)
    async with served() as app:
        reader, writer = await app.connect()
        writer.write(head(1000) + b'{"rows": [')
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert await app.still_answers()


async def test_a_client_that_leaves_half_a_body_is_forgotten() -> None:
    async with served(max_open_bytes=2000) as app:
        for _ in range(10):
            _, writer = await app.connect()
            writer.write(head(100_000) + b'{"rows": [' + b" " * 1500)
            await writer.drain()
            writer.close()
        while not await app.still_answers():  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.01)


async def test_bodies_together_stay_within_their_limit() -> None:
    async with served(HeldEngine, max_num_seqs=64, max_open_bytes=20_000) as app:
        engine = cast(HeldEngine, app.engine)
        rows = [{"id": "0", "prompt": "a" * 4000}]
        first = [asyncio.create_task(app.client.post("/generate", json={"rows": rows})) for _ in range(4)]
        await until(lambda: engine.held == 4)
        refused = await app.client.post("/generate", json={"rows": rows})
        engine.release.set()
        answers = await asyncio.gather(*first)
        again = await app.client.post("/generate", json={"rows": rows})
    assert [answer.status_code for answer in answers] == [200] * 4
    assert (refused.status_code, again.status_code) == (429, 200)
    assert refused.headers["Retry-After"]


async def test_a_body_too_long_is_told_so_when_it_has_ended() -> None:
    async with served(max_request_bytes=1_000_000) as app:
        response = await app.client.post("/generate", content=b" " * 7_000_000)
    assert response.status_code == 413


async def test_a_body_without_end_is_cut_off() -> None:
    async with served(max_request_bytes=100_000) as app:
        reader, writer = await app.connect()
        first = "POST /generate HTTP/1.1\r\nHost: app\r\nTransfer-Encoding: chunked\r\n"
        writer.write((first + "Content-Type: application/json\r\n\r\n").encode())

        async def pour() -> None:
            while True:
                writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
                await writer.drain()

        pouring = asyncio.create_task(pour())
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):
            await pouring
        assert await app.still_answers()


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", "Basic hush", "hush", "Bearer hush2", "Bearer \xff"]
)
async def test_a_wrong_token_is_refused(authorization: str) -> None:
    async with served(api_token="hush") as app:
        headers = {b"Authorization": authorization.encode("latin-1")}
        for method, path in [("POST", "/generate"), ("GET", "/stats"), ("GET", "/openapi.json")]:
            response = await app.client.request(method, path, headers=headers, content=b"{}")
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/ready"):
            assert (await app.client.get(path, headers=headers)).status_code == 200


async def test_the_right_token_is_let_in() -> None:
    settings = make_settings(api_token="hush")
    async with served(api_token="hush") as app, InferenceClient(app.endpoint, settings.api_token) as client:
        assert len([result async for result in client.generate(make_body(3))]) == 3
    assert "hush" not in repr(settings)
