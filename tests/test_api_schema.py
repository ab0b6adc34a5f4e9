"""The OpenAPI schema tells the truth: Schemathesis sends what it allows and what it forbids."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from apps.engines.base import Engine
from apps.engines.simulated import SimulatedEngine
from apps.inference_app import create_app
from apps.schema import NDJSON
from tests.conftest import ROOT
from tests.engines import make_body, make_settings
from tests.loopback import serve

TOKEN = "secret"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "SCHEMATHESIS_HOOKS": "tests.schema_checks",
    # Its tables of characters, which take seconds to make, outlast a run here.
    "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),
}
COMMAND = "from schemathesis.cli import schemathesis; schemathesis()"


async def run(folder: Path, *options: str, engine: type[Engine] = SimulatedEngine) -> tuple[int, str]:
    """Exit status and report of a run that is the same each time, in an empty folder."""
    app = create_app(engine, lambda: make_settings(api_token=TOKEN), on_dead=lambda: None)
    async with serve(app) as endpoint:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "run", f"{endpoint}/openapi.json", "--no-color"),
            *("-H", f"Authorization: Bearer {TOKEN}", "--exclude-checks", "positive_data_acceptance"),
            *("--generation-deterministic", *options),
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        report, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, report.decode()


async def test_every_answer_is_as_the_schema_says(tmp_path: Path) -> None:
    status, report = await run(tmp_path, "--max-examples", "10", "--continue-on-failure")
    assert status == 0, report
    assert "8 selected / 8 total" in report
    assert "Warnings" not in report


async def test_every_line_is_as_the_schema_says(tmp_path: Path) -> None:
    options = ("--include-path", "/generate", "--phases", "examples,fuzzing", "-H", f"Accept: {NDJSON}")
    status, report = await run(tmp_path, *options, "--max-examples", "10")
    assert status == 0, report


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Is 17 prime?"}]}
TEXT: dict[str, Any] = {"prompt": "Is 17 prime?"}
PATHS = {"rows": "/generate", "messages": "/v1/chat/completions", "prompt": "/v1/completions"}


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        (make_body(deadline_s=None), True),
        (make_body(sampling={"structured_outputs": {"json": {"type": "object"}}}), True),
        ({"rows": [{"id": "0", "prompt": 7}]}, True),
        ({"rows": [{"prompt": "a"}]}, False),
        ({**make_body(), "sampling": None}, False),
        ({**make_body(), "sampling": {"n": 2}}, False),
        ({**make_body(), "sampling": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, False),
        ({**CHAT, "structured_outputs": {"json": {"type": "object"}, "regex": None}}, True),
        ({**CHAT, "stop": "a", "seed": None, "tools": [], "foo": False, "metadata": {"a": 1}}, True),
        ({**CHAT, "best_of": 1.0, "tool_choice": "auto", "add_special_tokens": False}, True),
        ({**CHAT, "foo": 0}, False),
        ({**CHAT, "tool_choice": "required"}, False),
        ({**CHAT, "add_special_tokens": True}, False),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [], "refusal": None}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ({"messages": [{"role": "user", "content": []}]}, False),
        ({"messages": None}, False),
        ({"prompt": ["a", [1, 2]], "add_special_tokens": True}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[]]}, False),
        ({**TEXT, "max_completion_tokens": 5}, False),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_schema_and_app_agree(body: dict[str, Any], is_right: bool) -> None:
    app = create_app(SimulatedEngine, make_settings, on_dead=lambda: None)
    path = PATHS[next(iter(body))]
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
        response = await client.post(f"http://app{path}", json=body)
        document = app.openapi()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    assert jsonschema_rs.is_valid(schema, body) == is_right
    assert (response.status_code == 200) == is_right


class Faulty(SimulatedEngine):
    async def check_health(self) -> None:
        raise RuntimeError("a fault that nothing expects")


async def test_an_answer_outside_the_schema_is_found(tmp_path: Path) -> None:
    options = ("--include-path", "/health", "--phases", "fuzzing")
    status, report = await run(tmp_path, *options, engine=Faulty)
    assert status == 1
    assert "[500] Internal Server Error" in report
    assert '"type":"server_error"' in report
