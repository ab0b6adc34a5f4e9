"""The OpenAPI schema tells the truth: Schemathesis sends what it allows and what it forbids."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from apps.engines.base import Engine
from apps.engines.simulated import SimulatedEngine
from apps.inference_app import create_app
from apps.schema import NDJSON
from tests.conftest import ROOT
from tests.engines import make_settings
from tests.loopback import serve

TOKEN = "secret"
COMMAND = "from schemathesis.cli import schemathesis; schemathesis()"


async def run(folder: Path, *options: str, engine: type[Engine] = SimulatedEngine) -> tuple[int, str]:
    """Exit status and report of a run that is the same each time, in an empty folder."""
    app = create_app(engine, lambda: make_settings(api_token=TOKEN), on_dead=lambda: None)
    async with serve(app) as endpoint:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "run", f"{endpoint}/openapi.json", "--no-color"),
            *("-H", f"Authorization: Bearer {TOKEN}", "--exclude-checks", "positive_data_acceptance"),
            *("--seed", "1", "--generation-deterministic", *options),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.schema_checks"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        report, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, report.decode()


async def test_every_answer_is_as_the_schema_says(tmp_path: Path) -> None:
    status, report = await run(tmp_path, "--max-examples", "20", "--continue-on-failure")
    assert status == 0, report
    assert "8 selected / 8 total" in report
    assert "Warnings" not in report


async def test_every_line_is_as_the_schema_says(tmp_path: Path) -> None:
    options = ("--include-path", "/generate", "--phases", "examples,fuzzing", "-H", f"Accept: {NDJSON}")
    status, report = await run(tmp_path, *options, "--max-examples", "20")
    assert status == 0, report


class Faulty(SimulatedEngine):
    async def check_health(self) -> None:
        raise RuntimeError("a fault that nothing expects")


async def test_an_answer_outside_the_schema_is_found(tmp_path: Path) -> None:
    options = ("--include-path", "/health", "--phases", "fuzzing")
    status, report = await run(tmp_path, *options, engine=Faulty)
    assert status == 1
    assert "[500] Internal Server Error" in report
    assert '"type":"server_error"' in report
