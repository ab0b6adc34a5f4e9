"""CPU time that a row costs the app, and how long `/health` waits under full load.

The app runs in a process of its own, on the simulated engine that answers at once, and is sent chunks of
rows as `infer_batch` sends them. Printed are microseconds of that process's CPU a row, in interleaved
rounds:

- app: everything, from HTTP to NDJSON;
- engine: the simulated engine alone, asked directly;
- own: their difference, which is HTTP, validation, admission, answers and accounts;
- bare: a server that only parses the rows, passes them through a TokenBatcher, and answers lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import uvicorn
from fastapi import FastAPI, Request
from flyte.extras import TokenBatcher
from rich.console import Console
from rich.table import Table
from starlette.responses import StreamingResponse

from apps.engines.simulated import SimulatedEngine
from apps.local import ROOT
from apps.schema import NDJSON, Row, SamplingParams
from apps.settings import AppSettings
from benchmarks.throughput import load_rows, machine

NUM_ROUNDS = 5
NUM_REPEATS = 8
"""Times that the 1,000 problems are sent in a round."""
CHUNK_SIZE = 50
MAX_CONCURRENCY = 10
HEADERS = {"Accept": NDJSON, "Content-Type": "application/json"}
HEALTH_INTERVAL_S = 0.02
SETTINGS = {
    "SATURATE_ENGINE": "simulated",
    "SATURATE_MODEL": "simulated",
    "SATURATE_SIMULATED__TIME_SCALE": "0",
    "SATURATE_SIMULATED__KV_CACHE_TOKENS": "10000000",
}


def bare_app() -> FastAPI:
    """The floor: nothing is validated, admitted, counted or kept."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def echo(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return rows

        async with TokenBatcher[dict[str, Any], dict[str, Any]](echo, batch_timeout_s=0.005) as batcher:
            app.state.batcher = batcher
            yield

    async def generate(request: Request) -> StreamingResponse:
        rows = (await request.json())["rows"]
        futures = [await request.app.state.batcher.submit(row, estimated_tokens=100) for row in rows]

        async def lines() -> AsyncIterator[bytes]:
            done = await asyncio.gather(*futures)
            yield b"".join(json.dumps({"id": row["id"], "text": "4"}).encode() + b"\n" for row in done)

        return StreamingResponse(lines(), media_type=NDJSON)

    app = FastAPI(lifespan=lifespan)
    app.add_api_route("/generate", generate, methods=["POST"], response_model=None)
    return app


def make_bodies(name: str) -> list[bytes]:
    """Under a name of their own, so that none of them joins another's rows."""
    rows = load_rows() * NUM_REPEATS
    chunks = (rows[start : start + CHUNK_SIZE] for start in range(0, len(rows), CHUNK_SIZE))
    sampling = {"max_tokens": 256}
    return [
        json.dumps({"rows": chunk, "task_id": f"{name} {number}", "sampling": sampling}).encode()
        for number, chunk in enumerate(chunks)
    ]


@asynccontextmanager
async def server(*command: str) -> AsyncIterator[tuple[psutil.Process, httpx.AsyncClient]]:
    """`command` prints the port it listens on as JSON."""
    environment = {**os.environ, **SETTINGS}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    port = json.loads(await process.stdout.readline())["port"]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield psutil.Process(process.pid), client
    finally:
        process.terminate()
        await process.wait()


async def send(client: httpx.AsyncClient, bodies: list[bytes]) -> None:
    semaphore = asyncio.Semaphore(MAX_CONCURRENCY)

    async def one(body: bytes) -> None:
        async with semaphore:
            response = await client.post("/generate", content=body, headers=HEADERS)
            assert response.status_code == 200, response.text[:500]
            assert response.content.count(b'"text":') == CHUNK_SIZE

    await asyncio.gather(*map(one, bodies))


async def cpu_us_per_row(process: psutil.Process, client: httpx.AsyncClient, name: str) -> float:
    bodies = make_bodies(name)
    before = process.cpu_times()
    await send(client, bodies)
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return cpu_s / (len(bodies) * CHUNK_SIZE) * 1e6


async def engine_us_per_row(rows: list[Row]) -> float:
    """Of the engine asked directly, as many rows at a time as the app has in flight."""
    engine = SimulatedEngine(AppSettings())
    sampling = SamplingParams(max_tokens=256)

    async def one(row: Row) -> None:
        await engine.generate(await engine.render(row), sampling)

    in_flight = MAX_CONCURRENCY * CHUNK_SIZE
    started = time.process_time()
    for start in range(0, len(rows), in_flight):
        await asyncio.gather(*map(one, rows[start : start + in_flight]))
    cpu_s = time.process_time() - started
    await engine.close()
    return cpu_s / len(rows) * 1e6


async def health_waits_s(client: httpx.AsyncClient, load: asyncio.Task[None]) -> list[float]:
    waits = []
    while not load.done():
        started = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        waits.append(time.perf_counter() - started)
        await asyncio.sleep(HEALTH_INTERVAL_S)
    await load
    return waits


async def measure() -> tuple[list[tuple[float, float, float]], list[float]]:
    """`(app, engine, bare)` for each round, and the seconds that `/health` took; a first round warms up."""
    rows = [Row.model_validate(row) for row in load_rows()] * NUM_REPEATS
    rounds = []
    async with (
        server(sys.executable, "-m", "apps.server") as (app, client),
        server(sys.executable, "-m", "benchmarks.app_cost", "--bare") as (bare, bare_client),
        httpx.AsyncClient(base_url=client.base_url) as health_client,
    ):
        for number in range(NUM_ROUNDS + 1):
            app_us = await cpu_us_per_row(app, client, f"round {number}")
            engine_us = await engine_us_per_row(rows)
            rounds.append((app_us, engine_us, await cpu_us_per_row(bare, bare_client, "bare")))
        load = asyncio.create_task(
            send(client, [body for n in range(3) for body in make_bodies(f"load {n}")])
        )
        waits = await health_waits_s(health_client, load)
    return rounds[1:], waits


def report(rounds: list[tuple[float, float, float]], waits: list[float]) -> None:
    table = Table("round", "app µs/row", "engine", "own", "bare", "own / bare")
    for number, (app, engine, bare) in enumerate(rounds, start=1):
        own = app - engine
        table.add_row(str(number), *(f"{us:.0f}" for us in (app, engine, own, bare)), f"{own / bare:.2f}")
    console = Console()
    console.print(table)
    owns = [app - engine for app, engine, _ in rounds]
    console.print(
        f"own: median {statistics.median(owns):.0f} µs of CPU a row, {min(owns):.0f} to {max(owns):.0f}, "
        f"{len(rounds)} rounds of {len(load_rows()) * NUM_REPEATS} rows"
    )
    p99 = statistics.quantiles(waits, n=100)[98]
    console.print(
        f"/health under full load: worst {max(waits) * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, "
        f"{len(waits)} requests"
    )
    console.print(f"python -m benchmarks.app_cost, {machine()}")


def serve_bare() -> None:
    config = uvicorn.Config(bare_app(), log_level="warning")
    listener = config.bind_socket()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    os.chdir(ROOT)
    if sys.argv[1:] == ["--bare"]:
        serve_bare()
        return
    os.environ.update(SETTINGS)
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        report(*runner.run(measure()))


if __name__ == "__main__":
    main()
