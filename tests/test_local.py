"""The local app's process group ends with its starter, and with its own main process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from apps.errors import EngineUnavailable
from apps.local import app_environment, detect_accelerator, local_app
from tests.conftest import ROOT
from tests.processes import PROMISED_S, ended, group_of, server_of, watchdog_of

STARTER = """
import asyncio, signal, sys
from pathlib import Path
from apps.local import local_app

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's background job

async def main():
    async with local_app("", Path(sys.argv[1])) as app:
        print(await app.wait_ready(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SATURATE_ENGINE", "simulated")


@pytest.fixture
def leaders(tmp_path: Path) -> Iterator[list[int]]:
    """Groups that a test started; whatever is left of them is killed afterwards."""
    started: list[int] = []
    yield started
    for pid in started:
        for process in group_of(pid):
            process.kill()


async def test_the_app_answers_until_its_starter_leaves(tmp_path: Path, leaders: list[int]) -> None:
    async with local_app("", tmp_path / "app.log") as app, httpx.AsyncClient() as client:
        leaders.append(app._watchdog.pid)
        endpoint = await app.wait_ready()
        health = await client.get(f"{endpoint}/health")
    assert health.status_code == 200
    assert group_of(leaders[0]) == []
    assert "Application shutdown complete" in (tmp_path / "app.log").read_text()


@pytest.mark.parametrize("victim", ["server", "watchdog"])
async def test_killing_the_app_is_noticed(victim: str, tmp_path: Path, leaders: list[int]) -> None:
    async with local_app("", tmp_path / "app.log") as app:
        leaders.append(app._watchdog.pid)
        await app.wait_ready()
        group = group_of(app._watchdog.pid)
        pid = server_of(group).pid if victim == "server" else app._watchdog.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="ended"):
            await asyncio.wait_for(app.watch(), PROMISED_S)
    assert await ended(leaders[0])


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_the_app_ends_with_its_starter(
    with_signal: signal.Signals, tmp_path: Path, leaders: list[int]
) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "app.log")]
    starter = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert starter.stdout is not None
    assert (await starter.stdout.readline()).startswith(b"http://127.0.0.1:")
    watchdog = watchdog_of(starter.pid)
    leaders.append(watchdog.pid)
    assert len(group_of(watchdog.pid)) == 2
    starter.send_signal(with_signal)
    await starter.wait()
    assert await ended(watchdog.pid)


async def test_an_app_that_cannot_start_says_why(
    tmp_path: Path, leaders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SATURATE_MAX_MODEL_LEN", "-5")
    async with local_app("", tmp_path / "app.log") as app:
        leaders.append(app._watchdog.pid)
        with pytest.raises(EngineUnavailable, match=r"(?s)did not start.*max_model_len"):
            await app.wait_ready()


def test_the_model_asked_for_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SATURATE_MODEL", raising=False)
    assert app_environment("")["SATURATE_MODEL"] == "models/arithmetic"
    monkeypatch.setenv("SATURATE_MODEL", "from the environment")
    assert app_environment("")["SATURATE_MODEL"] == "from the environment"
    assert app_environment("asked for")["SATURATE_MODEL"] == "asked for"


def test_a_model_folder_is_named_from_where_the_app_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert app_environment("mine")["SATURATE_MODEL"] == str(tmp_path / "mine")
    assert app_environment("Qwen/Qwen2.5-7B")["SATURATE_MODEL"] == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [("NVIDIA H200", "H200"), ("NVIDIA L4", "L4"), ("NVIDIA A100-SXM4-80GB", "A100"), ("GTX 9", "L4")],
)
def test_the_preset_follows_the_gpu(
    gpu: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detect_accelerator() == "cpu" or os.path.exists("/dev/nvidia0")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {json.dumps(gpu)}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert detect_accelerator() == preset
