"""The whole pipeline on the simulated engine: what goes in comes out, and what cannot be used is said."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import flyte
import flyte.errors
import pandas as pd
import pytest

from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineTimeout
from apps.inference_app import create_app
from apps.settings import AppSettings
from tasks import infer_batch as infer_module
from tasks.infer_batch import infer_batch
from tests.conftest import ROOT
from tests.drivers import make_problems, read_run, run_driver, write_jsonl
from tests.engines import FaultyEngine, HeldEngine, make_settings, until
from tests.loopback import serve
from tests.processes import PROMISED_S, ended, group_of, server_of, watchdog_of
from workflows import batch_inference, gsm8k

BIN = Path(sys.executable).parent


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    app = create_app(SimulatedEngine, make_settings, on_dead=lambda: None)
    async with serve(app) as url:
        yield url


async def test_every_row_comes_out_once_and_in_order(endpoint: str, tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(103))
    returned = await run_driver(
        gsm8k.main,
        dataset=dataset,
        chunk_size=10,
        endpoint=endpoint,
        output=str(tmp_path / "run"),
    )
    manifest, results = read_run(tmp_path / "run")
    assert manifest == returned
    assert (manifest.rows_in, manifest.rows_ok, manifest.rows_failed) == (103, 103, 0)
    assert results["id"].tolist() == [str(n) for n in range(103)]
    assert results["prompt"].tolist() == [row["question"] for row in make_problems(103)]
    assert results["text"].nunique() == 103
    assert manifest.completion_tokens == results["completion_tokens"].sum() > 0
    assert (manifest.model, manifest.model_revision) == ("sim", "seed-0")


async def test_the_manifest_vouches_for_its_parts(endpoint: str, tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(7))
    await run_driver(gsm8k.main, dataset=dataset, endpoint=endpoint, output=str(tmp_path / "run"))
    manifest, results = read_run(tmp_path / "run")
    digests = [
        hashlib.sha256((tmp_path / "run" / part.path).read_bytes()).hexdigest() for part in manifest.parts
    ]
    assert digests == [part.sha256 for part in manifest.parts]
    assert sum(part.rows for part in manifest.parts) == len(results) == 7
    assert not list((tmp_path / "run").glob("*.partial"))


async def test_bad_rows_fail_alone_and_say_why(endpoint: str, tmp_path: Path) -> None:
    bad = {"long": "x" * 20_000, "empty": "", "null": None, "number": 17, "megabyte": "y" * 1_000_000}
    rows: list[dict[str, Any]] = [{"key": f"good-{n}", "text": f"Say {n}."} for n in range(5)]
    rows[2:2] = [{"key": key, "text": text} for key, text in bad.items()]
    manifest = await run_driver(
        batch_inference.main,
        dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
        prompt_column="text",
        id_column="key",
        chunk_size=10,
        endpoint=endpoint,
        output=str(tmp_path / "run"),
    )
    _, results = read_run(tmp_path / "run")
    failed = results[results["error_kind"].notna()].set_index("id")
    assert (manifest.rows_in, manifest.rows_ok, manifest.rows_failed) == (10, 5, 5)
    assert failed["error_kind"].to_dict() == {
        "long": "too_long",
        "empty": "empty",
        "null": "invalid_prompt",
        "number": "invalid_prompt",
        "megabyte": "too_long",
    }
    assert results["id"].tolist() == [row["key"] for row in rows]
    assert failed["error"].str.len().between(10, 300).all()


async def test_chunks_of_a_job_share_the_engine(tmp_path: Path) -> None:
    engines: list[HeldEngine] = []

    def make_engine(settings: Any) -> HeldEngine:
        engines.append(HeldEngine(settings))
        return engines[0]

    app = create_app(make_engine, lambda: make_settings(max_num_seqs=50), on_dead=lambda: None)
    async with serve(app) as endpoint:
        dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(40))
        job = asyncio.create_task(
            run_driver(gsm8k.main, dataset=dataset, chunk_size=5, max_concurrency=4, endpoint=endpoint)
        )
        await until(lambda: engines[0].held == 20)
        await asyncio.sleep(0.1)
        assert engines[0].most_held == 20
        engines[0].release.set()
        manifest = await job
    assert manifest.rows_ok == 40


async def test_rows_that_fail_for_a_while_are_asked_again(tmp_path: Path) -> None:
    settings = make_settings(simulated={"failure_rate": 0.2})
    app = create_app(SimulatedEngine, lambda: settings, on_dead=lambda: None)
    async with serve(app) as endpoint:
        dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(60))
        manifest = await run_driver(gsm8k.main, dataset=dataset, chunk_size=20, endpoint=endpoint)
    assert (manifest.rows_ok, manifest.rows_failed) == (60, 0)


@pytest.fixture
def one_quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flyte's own backoff, and ours between two passes, take no time."""
    pause = timedelta(milliseconds=1)
    retries = flyte.RetryStrategy(count=1, backoff=flyte.Backoff(base=pause, factor=1))
    monkeypatch.setattr(infer_batch, "retries", retries)
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)


@pytest.mark.usefixtures("one_quick_retry")
async def test_a_row_that_never_succeeds_costs_only_itself(tmp_path: Path) -> None:
    fault = EngineTimeout("no token came")
    app = create_app(lambda s: FaultyEngine(s, fault), make_settings, on_dead=lambda: None)
    rows = [{"prompt": "poison" if n == 7 else f"Say {n}."} for n in range(20)]
    async with serve(app) as endpoint:
        manifest = await run_driver(
            batch_inference.main,
            dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
            chunk_size=10,
            endpoint=endpoint,
            output=str(tmp_path / "run"),
        )
    _, results = read_run(tmp_path / "run")
    assert (manifest.rows_ok, manifest.rows_failed) == (19, 1)
    assert results["error_kind"].dropna().to_dict() == {7: "timeout"}


async def test_chunks_larger_than_the_app_takes_are_halved(tmp_path: Path) -> None:
    small = make_settings(max_queue_size=20, max_request_bytes=5000)
    app = create_app(SimulatedEngine, lambda: small, on_dead=lambda: None)
    rows = [{"prompt": "x" * 6000 if n == 33 else f"Say {n}."} for n in range(100)]
    async with serve(app) as endpoint:
        manifest = await run_driver(
            batch_inference.main,
            dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
            chunk_size=100,
            endpoint=endpoint,
            output=str(tmp_path / "run"),
        )
    _, results = read_run(tmp_path / "run")
    assert (manifest.rows_ok, manifest.rows_failed) == (99, 1)
    assert results["error_kind"].dropna().to_dict() == {33: "too_long"}


@pytest.mark.usefixtures("one_quick_retry")
async def test_a_run_without_an_answer_is_written_and_fails(tmp_path: Path) -> None:
    settings = make_settings(simulated={"failure_rate": 1.0})
    app = create_app(SimulatedEngine, lambda: settings, on_dead=lambda: None)
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(6))
    async with serve(app) as endpoint:
        with pytest.raises(flyte.errors.RuntimeUserError, match="6 of 6 rows failed"):
            await run_driver(gsm8k.main, dataset=dataset, endpoint=endpoint, output=str(tmp_path / "run"))
    manifest, results = read_run(tmp_path / "run")
    assert (manifest.rows_failed, manifest.accuracy_strict) == (6, None)
    assert set(results["error_kind"]) == {"engine_error"}


@pytest.mark.usefixtures("one_quick_retry")
async def test_losing_the_app_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_module, "LOCAL_PATIENCE_S", 0.2)
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(40))
    engines: list[HeldEngine] = []

    def make_engine(settings: AppSettings) -> HeldEngine:
        engines.append(HeldEngine(settings))
        return engines[0]

    inputs = {"dataset": dataset, "chunk_size": 10, "max_concurrency": 1, "output": str(tmp_path / "run")}
    async with AsyncExitStack() as stack:
        app = create_app(make_engine, make_settings, on_dead=lambda: None)
        endpoint = await stack.enter_async_context(serve(app))
        job = asyncio.create_task(run_driver(gsm8k.main, endpoint=endpoint, **inputs))
        await until(lambda: engines and engines[0].held)
        engines[0].release.set()
        await until(lambda: engines[0].most_held and not engines[0].held)
    with pytest.raises(flyte.errors.RuntimeUserError, match="could not be reached any more"):
        await job
    manifest, results = read_run(tmp_path / "run")
    assert manifest.rows_in == len(results) == 40
    assert manifest.rows_ok + manifest.rows_failed == 40
    assert 10 <= manifest.rows_ok < 40


@pytest.mark.usefixtures("one_quick_retry")
async def test_an_app_that_refuses_ends_the_job(endpoint: str, tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(3))
    output = tmp_path / "run"
    with pytest.raises(flyte.errors.RuntimeUserError, match="404 from"):
        await run_driver(gsm8k.main, dataset=dataset, endpoint=f"{endpoint}/nowhere", output=str(output))
    assert not (output / "manifest.json").exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
async def test_any_file_type_gives_the_same_answers(suffix: str, endpoint: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"city": ["Zürich", "Łódź, PL", 'the "Hague"'], "n": ["1", "2", "3"]})
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    await run_driver(
        batch_inference.main,
        dataset=str(path),
        prompt_template="{{ n }}: where is {{ city }}?",
        endpoint=endpoint,
        output=str(tmp_path / "run"),
    )
    _, results = read_run(tmp_path / "run")
    assert results["prompt"].tolist() == [
        "1: where is Zürich?",
        "2: where is Łódź, PL?",
        '3: where is the "Hague"?',
    ]
    assert results["text"].notna().all()


async def test_a_second_run_leaves_nothing_of_the_first(endpoint: str, tmp_path: Path) -> None:
    for num_rows in (30, 4):
        dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(num_rows))
        await run_driver(gsm8k.main, dataset=dataset, endpoint=endpoint, output=str(tmp_path / "run"))
    manifest, results = read_run(tmp_path / "run")
    assert manifest.rows_in == len(results) == 4


UNUSABLE = [
    pytest.param({"chunk_size": 0}, "chunk_size=0: must be at least 1", id="chunk size"),
    pytest.param({"max_concurrency": 0}, "max_concurrency=0: must be at least 1", id="concurrency"),
    pytest.param({"num_questions": 0}, "num_questions=0: must be at least 1", id="limit"),
    pytest.param({"max_tokens": 0}, "sampling.max_tokens: .* got 0", id="sampling"),
    pytest.param({"dataset": "no/such.jsonl"}, "dataset='no/such.jsonl': no such file", id="missing"),
    pytest.param({"dataset": "README.md"}, "unknown file type '.md'", id="file type"),
    pytest.param({"dataset": "{tmp}/empty.jsonl"}, "dataset='.*empty.jsonl': has no rows", id="empty"),
    pytest.param({"dataset": "{tmp}/other.jsonl"}, "prompt_column='question': .* text", id="column"),
    pytest.param({"endpoint": "localhost:8000"}, "endpoint='localhost:8000': is no http", id="endpoint"),
    pytest.param({"output": "README.md"}, "output='README.md': README.md is a file", id="output"),
]


@pytest.mark.parametrize(("inputs", "line"), UNUSABLE)
async def test_an_unusable_input_is_named_and_nothing_written(
    inputs: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_jsonl(tmp_path / "other.jsonl", [{"text": "a"}])
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(3))
    if "dataset" in inputs:
        inputs = {**inputs, "dataset": inputs["dataset"].format(tmp=tmp_path)}
    inputs = {"dataset": dataset, "output": str(tmp_path / "run"), **inputs}
    with pytest.raises(flyte.errors.RuntimeUserError, match=line) as caught:
        await run_driver(gsm8k.main, **inputs)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


async def test_another_model_than_the_one_served_is_an_error(endpoint: str, tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(3))
    with pytest.raises(flyte.errors.RuntimeUserError, match=r"model='other': the app at .* serves 'sim'"):
        await run_driver(gsm8k.main, dataset=dataset, endpoint=endpoint, model="other")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the app that a driver starts a simulated one that answers at once."""
    monkeypatch.setenv("SATURATE_ENGINE", "simulated")
    monkeypatch.setenv("SATURATE_SIMULATED__TIME_SCALE", "0")
    return monkeypatch


def flyte_run(dataset: str, output: Path, *more: str) -> list[str]:
    driver = ["run", "--local", "workflows/gsm8k.py", "main"]
    return [f"{BIN}/flyte", *driver, "--dataset", dataset, "--output", str(output), *more]


@pytest.mark.usefixtures("simulated")
def test_the_command_line_starts_its_own_app(tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(25))
    done = subprocess.run(flyte_run(dataset, tmp_path / "run"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest, _ = read_run(tmp_path / "run")
    assert (manifest.rows_in, manifest.rows_ok) == (25, 25)
    assert "starting the engine" in done.stderr
    assert "Application startup" in (tmp_path / "run" / "app.log").read_text()
    report = [sys.executable, "-m", "tasks.report", str(tmp_path / "run")]
    table = subprocess.run(report, cwd=ROOT, capture_output=True, text=True).stdout
    assert "accuracy, strict" in table


def test_the_command_line_ends_with_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = flyte_run("no/such.jsonl", tmp_path / "run", "--chunk_size", "0")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "chunk_size=0: must be at least 1" in done.stdout.splitlines()[-2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("victim", ["driver", "app"])
async def test_nothing_is_left_of_a_job_that_is_killed(
    victim: str, simulated: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated.setenv("SATURATE_SIMULATED__TIME_SCALE", "1000")
    dataset = write_jsonl(tmp_path / "problems.jsonl", make_problems(25))
    driver = await asyncio.create_subprocess_exec(
        *flyte_run(dataset, tmp_path / "run"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert driver.stderr is not None
    while not (await driver.stderr.readline()).startswith(b"ready"):
        assert not driver.stderr.at_eof()
    watchdog = watchdog_of(driver.pid)
    os.kill(driver.pid if victim == "driver" else server_of(group_of(watchdog.pid)).pid, signal.SIGKILL)
    stdout, _ = await asyncio.wait_for(driver.communicate(), PROMISED_S)
    assert await ended(watchdog.pid)
    assert driver.returncode == (-signal.SIGKILL if victim == "driver" else 1)
    assert victim == "driver" or b"the inference app ended" in stdout
    assert not (tmp_path / "run" / "manifest.json").exists()
