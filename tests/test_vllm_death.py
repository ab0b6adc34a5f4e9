"""Real vLLM, whose engine process is killed under load."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest

from apps.errors import EngineUnavailable
from apps.inference_app import LAST_ANSWERS_S
from apps.local import local_app
from apps.schema import NDJSON
from tests.engines import make_body
from tests.processes import ended, group_of, server_of


def engine_of(server: psutil.Process) -> psutil.Process:
    (engine,) = (child for child in server.children() if child.name().startswith("VLLM::Engine"))
    return engine


@pytest.mark.vllm
@pytest.mark.timeout(420)
async def test_rows_of_a_killed_engine_are_answered_and_the_app_ends(tmp_path: Path) -> None:
    """The process ends `LAST_ANSWERS_S` after the engine, so a whole answer came before that."""
    assert LAST_ANSWERS_S <= 1.0
    async with local_app("", tmp_path / "app.log") as app:
        endpoint = await app.wait_ready()
        leader = app._watchdog.pid
        body = make_body(300, sampling={"ignore_eos": True, "max_tokens": 1500})
        body["rows"][0]["sampling"] = {"max_tokens": 1}
        async with (
            httpx.AsyncClient(base_url=endpoint, timeout=60) as client,
            client.stream("POST", "/generate", json=body, headers={"Accept": NDJSON}) as response,
        ):
            pieces = response.aiter_raw()
            content = await anext(pieces)
            engine_of(server_of(group_of(leader))).kill()
            content += b"".join([piece async for piece in pieces])
        first, *others, last = [json.loads(line) for line in content.splitlines()]
        assert last == {"done": True, "rows": 300}
        assert (first["id"], first["error_kind"]) == ("0", None)
        assert {line.get("error_kind") for line in others if "id" in line} == {"engine_error"}
        with pytest.raises(EngineUnavailable, match="ended"):
            await app.watch()
        assert await ended(leader)
