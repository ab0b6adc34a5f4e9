"""The real Hub client against a Hub that fails on demand.

The client runs in a process of its own, because it reads its address and cache folder when imported;
there `time.sleep` only notes how long it was asked to wait. Each test loads a data set that no other
has cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_standin import CUT_SHORT, FOREVER, ROWS, HubStandIn, serve_hub

ROOT = Path(__file__).resolve().parents[1]
LOADER = """
import json, sys, time
waits = []
time.sleep = waits.append
from tasks.load import Source, load_rows
for line in sys.stdin:
    waits.clear()
    try:
        answer = {"rows": list(load_rows(Source(**json.loads(line))))}
    except Exception as exc:
        answer = {"error": type(exc).__name__, "message": str(exc)}
    print(json.dumps({**answer, "waits": waits}), flush=True)
"""
"""Takes the fields of a `Source` on a line and answers with its rows, or how loading them failed."""

Load = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStandIn]:
    with serve_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def load(hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads `main/test` of a data set, in the other process."""
    home = tmp_path_factory.mktemp("hf-home")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", LOADER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=home, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def load(dataset: str, config: str = "main", split: str = "test", revision: str = "") -> Any:
            source = {"dataset": dataset, "config": config, "split": split, "revision": revision}
            stdin.write(json.dumps(source) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield load
        stdin.close()


@pytest.fixture(scope="module")
def known(hub: HubStandIn, load: Load) -> Load:
    """`load`, with the data set `cases/known` there."""
    hub.add_dataset("cases/known")
    return load


def test_hub_rows_keep_their_order(hub: HubStandIn, load: Load) -> None:
    hub.add_dataset("openai/gsm8k")
    assert load("openai/gsm8k") == {"rows": ROWS, "waits": []}
    assert 200 in hub.statuses("openai/gsm8k/resolve", "GET")


def test_second_load_downloads_nothing(hub: HubStandIn, load: Load) -> None:
    hub.add_dataset("cases/twice")
    assert load("cases/twice")["rows"] == load("cases/twice")["rows"] == ROWS
    assert hub.statuses("cases/twice/resolve", "GET").count(200) == 2, "the card and the rows, once each"


@pytest.mark.parametrize("retry_after", ["", "7"], ids=["plain", "retry-after"])
@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("place", ["tree", "revision", "resolve/*.parquet"])
def test_passing_hub_faults_are_survived(
    hub: HubStandIn, load: Load, place: str, status: int, retry_after: str
) -> None:
    name = f"cases/{place[:4]}-{status}-{retry_after or 'plain'}"
    hub.add_dataset(name)
    hub.fail(f"{name}/{place}", status, method="GET", times=2, retry_after=retry_after)
    assert load(name)["rows"] == ROWS
    assert hub.statuses(f"{name}/{place}")[:3] == [status, status, 200]


def test_broken_download_is_repeated(hub: HubStandIn, load: Load) -> None:
    hub.add_dataset("cases/cut-short")
    hub.fail("cases/cut-short/resolve/*.parquet", CUT_SHORT, method="GET")
    assert load("cases/cut-short")["rows"] == ROWS
    assert hub.statuses("cases/cut-short/resolve/*.parquet") == [CUT_SHORT, 200]


def test_broken_answer_is_asked_for_again(hub: HubStandIn, load: Load) -> None:
    hub.add_dataset("cases/half-said")
    hub.fail("cases/half-said/revision", CUT_SHORT)
    assert load("cases/half-said")["rows"] == ROWS
    assert hub.statuses("cases/half-said/revision") == [CUT_SHORT, 200]


@pytest.mark.parametrize("retry_after", [1, 30])
def test_retry_after_of_the_hub_is_kept_to(hub: HubStandIn, load: Load, retry_after: int) -> None:
    name = f"cases/asks-for-{retry_after}"
    hub.add_dataset(name)
    hub.fail(f"{name}/tree", 429, retry_after=str(retry_after))
    (waited_s,) = load(name)["waits"]
    assert waited_s >= retry_after


@pytest.mark.parametrize("place", ["revision", "tree", "resolve/*README.md", "resolve/*.parquet"])
def test_lasting_hub_fault_names_the_data_set(hub: HubStandIn, load: Load, place: str) -> None:
    name = f"cases/down-{place[-4:].strip('/')}"
    hub.add_dataset(name)
    hub.fail(f"{name}/{place}", 500, times=FOREVER)
    answer = load(name)
    assert answer["error"] == "JobError"
    assert is_one_line_on(name, answer["message"])


def test_refused_access_is_not_repeated(hub: HubStandIn, load: Load) -> None:
    hub.add_dataset("cases/private")
    hub.fail("cases/private/revision", 403, times=FOREVER)
    answer = load("cases/private")
    assert is_one_line_on("cases/private", answer["message"])
    assert hub.statuses("cases/private/revision") == [403]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"dataset": "cases/nobody"}, "cases/nobody"),
        ({"dataset": "cases/known", "config": "socratic"}, "socratic"),
        ({"dataset": "cases/known", "split": "validation"}, "validation"),
        ({"dataset": "cases/known", "split": "test[:3"}, "test[:3"),
        ({"dataset": "cases/known", "revision": "v9"}, "v9"),
        ({"dataset": "cases/known/main"}, "cases/known/main"),
        ({"dataset": "cases/kno wn"}, "cases/kno wn"),
        ({"dataset": ""}, "is empty"),
    ],
    ids=["data-set", "config", "split", "slice", "revision", "three-parts", "space", "empty"],
)
def test_unknown_source_is_named(known: Load, source: dict[str, str], named: str) -> None:
    answer = known(**source)
    assert answer["error"] == "JobError"
    assert is_one_line_on(source["dataset"], answer["message"])
    assert named in answer["message"]


def make_broken_file(path: Path) -> None:
    path.write_bytes(b"PAR1 and no more")


def make_script(path: Path) -> None:
    (path.parents[1] / f"{path.parents[1].name}.py").write_text("")


@pytest.mark.parametrize(
    "spoil", [make_broken_file, make_script, Path.unlink], ids=["broken", "script", "none"]
)
def test_unusable_files_are_a_job_error(hub: HubStandIn, load: Load, spoil: Callable[[Path], None]) -> None:
    name = f"cases/{spoil.__name__.replace('_', '-')}"
    spoil(hub.add_dataset(name))
    answer = load(name)
    assert answer["error"] == "JobError"
    assert is_one_line_on(name, answer["message"])


def is_one_line_on(dataset: str, message: str) -> bool:
    return message.startswith(f"dataset={dataset!r}: ") and "\n" not in message
