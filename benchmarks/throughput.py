"""What HTTP, app and batcher cost: rows a second through them, beside the same engine asked directly.

    make bench            on real vLLM with the embedded model
    SATURATE_ENGINE=simulated SATURATE_SIMULATED__TIME_SCALE=0 make bench     the layers alone

One engine, in this process, answers the same rows both ways in interleaved pairs. `direct` hands the
engine every row at once. `app` sends them as chunks over a socket, a capped number at a time. Printed
are rows a second, the CPU time of this process a row, and the ratio of each pair. vLLM computes in
processes of its own, so this CPU time is that of client, app and vLLM's front end together.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import uvicorn
from rich.console import Console
from rich.table import Table

from apps.engines.base import Engine
from apps.inference_app import create_app, make_engine
from apps.local import ROOT, app_environment
from apps.schema import Row, SamplingParams
from apps.settings import EMBEDDED_MODEL, AppSettings
from tasks.client import InferenceClient
from tasks.fan_out import fan_out

NUM_PAIRS = 5
CHUNK_SIZE = 50
MAX_CONCURRENCY = 10
SAMPLING = SamplingParams(max_tokens=128)


@dataclass(frozen=True)
class Measured:
    rows_per_s: float
    cpu_us_per_row: float
    completion_tokens: int


def load_rows() -> list[dict[str, Any]]:
    with (EMBEDDED_MODEL / "problems.jsonl").open() as file:
        questions = [json.loads(line)["question"] for line in file]
    return [
        {"id": str(number), "messages": [{"role": "user", "content": question}]}
        for number, question in enumerate(questions)
    ]


async def ask_directly(engine: Engine, rows: list[dict[str, Any]]) -> int:
    async def one(row: dict[str, Any]) -> int:
        prompt = await engine.render(Row.model_validate(row))
        return (await engine.generate(prompt, SAMPLING)).completion_tokens

    return sum(await asyncio.gather(*(one(row) for row in rows)))


async def ask_app(client: InferenceClient, rows: list[dict[str, Any]]) -> int:
    async def chunks() -> Any:
        for start in range(0, len(rows), CHUNK_SIZE):
            yield rows[start : start + CHUNK_SIZE]

    async def send(chunk: list[dict[str, Any]]) -> int:
        body = {"rows": chunk, "sampling": SAMPLING.model_dump()}
        results = [result async for result in client.generate(body)]
        failed = [result.error for result in results if result.error_kind]
        assert not failed, failed[0]
        return sum(result.completion_tokens for result in results)

    return sum([tokens async for _, tokens in fan_out(chunks(), send, MAX_CONCURRENCY)])


async def measure(work: Any, num_rows: int) -> Measured:
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = await work
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return Measured(num_rows / elapsed_s, cpu_s / num_rows * 1e6, tokens)


async def measure_pairs() -> tuple[str, list[tuple[Measured, Measured]]]:
    """Engine and version, and `(direct, app)` for each pair; the first pair warms up and is dropped."""
    rows = load_rows()
    engines: list[Engine] = []

    def keep_engine(settings: AppSettings) -> Engine:
        engines.append(make_engine(settings))
        return engines[0]

    server = uvicorn.Server(uvicorn.Config(create_app(keep_engine), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has a flag and no event
        await asyncio.sleep(0.05)
    endpoint = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    pairs = []
    async with InferenceClient(endpoint) as client:
        for _ in range(NUM_PAIRS + 1):
            direct = await measure(ask_directly(engines[0], rows), len(rows))
            app = await measure(ask_app(client, rows), len(rows))
            pairs.append((direct, app))
    name = engines[0].limits.engine
    server.should_exit = True
    await serving
    return name, pairs[1:]


def machine() -> str:
    """Commit and computer, for the line below a table."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return f"commit {commit or 'none'}, {platform.platform()}, {os.cpu_count()} cores"


def report(engine: str, pairs: list[tuple[Measured, Measured]]) -> None:
    table = Table(
        "pair", "direct rows/s", "app rows/s", "app / direct", "direct CPU µs/row", "app CPU µs/row"
    )
    for number, (direct, app) in enumerate(pairs, start=1):
        ratio = app.rows_per_s / direct.rows_per_s
        cells = (direct.rows_per_s, app.rows_per_s, ratio, direct.cpu_us_per_row, app.cpu_us_per_row)
        table.add_row(str(number), *(f"{cell:,.2f}" if cell < 10 else f"{cell:,.0f}" for cell in cells))
    ratios = [app.rows_per_s / direct.rows_per_s for direct, app in pairs]
    console = Console()
    console.print(table)
    console.print(
        f"app / direct: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, "
        f"{len(ratios)} pairs of {len(load_rows())} rows, {pairs[0][1].completion_tokens} completion tokens"
    )
    console.print(f"python -m benchmarks.throughput, {engine}, {machine()}")


def main() -> None:
    os.chdir(ROOT)
    os.environ.update(app_environment(""))
    report(*asyncio.run(measure_pairs()))


if __name__ == "__main__":
    main()
