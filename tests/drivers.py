"""Drivers run as tasks in this process, as `flyte run --local` does, against an app on a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flyte
import pandas as pd
import pyarrow.parquet as pq

from tasks.manifest import Manifest
from tests.conftest import ROOT


async def run_driver(task: Any, **inputs: Any) -> Manifest:
    """The manifest that the driver returns; a failing task raises `flyte.errors.RuntimeUserError`."""
    flyte.init(root_dir=ROOT)
    run = await flyte.with_runcontext(mode="local").run.aio(task, **inputs)
    manifest, _ = run.outputs()
    assert isinstance(manifest, Manifest)
    return manifest


def read_run(folder: Path) -> tuple[Manifest, pd.DataFrame]:
    """Manifest and results as they lie on disk."""
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_text())
    return manifest, pq.read_table(folder / "results").to_pandas()


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_problems(num_rows: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(num_rows)]
