"""SIGTERM, sent to a server process of its own: what runs is finished, what comes is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from apps.schema import NDJSON
from tests.conftest import ROOT
from tests.engines import make_body

SLOW = {
    "SATURATE_ENGINE": "simulated",
    "SATURATE_MODEL": "sim",
    "SATURATE_MAX_NUM_SEQS": "4",
    "SATURATE_SIMULATED__STEP_OVERHEAD_S": "0.01",
    "SATURATE_SIMULATED__WEIGHTS_GB": "0",
    "SATURATE_SIMULATED__MEAN_COMPLETION_TOKENS": "100000",
}
"""A hundred steps a second; rows are as long as their `max_tokens`."""


class Server:
    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.process = process
        self.endpoint = endpoint

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def serving(**environment: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "apps.server",
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **SLOW, **environment},
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        yield Server(process, f"http://127.0.0.1:{json.loads(line)['port']}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ask(client: httpx.AsyncClient, num_rows: int, max_tokens: int) -> dict[str, str | None]:
    """Kind of failure by row id, of an NDJSON answer that must be whole."""
    body = make_body(num_rows, sampling={"max_tokens": max_tokens})
    response = await client.post("/generate", json=body, headers={"Accept": NDJSON})
    lines = [json.loads(line) for line in response.content.splitlines()]
    assert lines.pop() == {"done": True, "rows": num_rows}
    return {line["id"]: line["error_kind"] for line in lines if "id" in line}


async def until_in_flight(client: httpx.AsyncClient, num_rows: int) -> None:
    while (await client.get("/stats")).json()["in_flight"] != num_rows:  # noqa: ASYNC110  # over HTTP
        await asyncio.sleep(0.01)


async def test_what_runs_is_finished_and_what_comes_is_refused() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.endpoint, timeout=60) as client:
        running = asyncio.create_task(ask(client, 20, max_tokens=100))
        await until_in_flight(client, 7)
        assert (await client.get("/ready")).status_code == 200
        server.terminate()
        while (await client.get("/ready")).status_code == 200:  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.01)
        refused = await client.post("/generate", json=make_body(1))
        assert (refused.status_code, (await client.get("/health")).status_code) == (503, 200)
        assert int(refused.headers["Retry-After"]) >= 1
        kinds = await running
        assert [kinds[str(n)] for n in range(20)] == [None] * 7 + ["cancelled"] * 13
        assert await server.process.wait() == -signal.SIGTERM


async def test_what_outlasts_the_grace_period_is_answered_as_cancelled() -> None:
    async with (
        serving(SATURATE_DRAIN_S="2.5") as server,
        httpx.AsyncClient(base_url=server.endpoint, timeout=60) as client,
    ):
        running = asyncio.create_task(ask(client, 3, max_tokens=3000))
        await until_in_flight(client, 3)
        server.terminate()
        assert set((await running).values()) == {"cancelled"}
        assert await server.process.wait() == -signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_ends_at_once(first: signal.Signals) -> None:
    async with serving() as server:
        server.process.send_signal(first)
        async with asyncio.timeout(15):
            assert await server.process.wait() == -first


async def test_a_dead_engine_fails_its_rows_and_ends_the_process() -> None:
    async with (
        serving(SATURATE_SIMULATED__DIE_AFTER="5") as server,
        httpx.AsyncClient(base_url=server.endpoint, timeout=60) as client,
    ):
        loop = asyncio.get_running_loop()
        started = loop.time()
        kinds = await ask(client, 20, max_tokens=3000)
        assert set(kinds.values()) == {"engine_error"}
        assert loop.time() - started < 10
        assert await server.process.wait() == 70
