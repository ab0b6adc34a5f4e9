"""Where a run's files go, and how they become visible: written beside, then renamed.

A run's folder holds `results/part-*.parquet`, `manifest.json` and, under `--local`, `app.log`. The
manifest is removed before the results change and written last, so a folder with a manifest is whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flyte.io import Dir

from apps.errors import JobError
from tasks.manifest import Manifest


def is_uri(output: str) -> bool:
    return "://" in output


class RunFolder:
    """The local folder of one run, held by this run alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.app_log = path / "app.log"
        self.staging = path / "results.partial"
        """Parts are written here until `commit`."""

    def commit(self, manifest: Manifest) -> None:
        results, final = self.path / "results", self.path / "manifest.json"
        final.unlink(missing_ok=True)
        shutil.rmtree(results, ignore_errors=True)
        self.staging.rename(results)
        partial = self.path / "manifest.json.partial"
        partial.write_text(manifest.model_dump_json(indent=2) + "\n")
        partial.rename(final)


def check_output(output: str, is_local: bool) -> None:
    """Raises `JobError` for an output that cannot be written to; writes nothing."""
    if not output or is_uri(output):
        return
    if not is_local:
        raise JobError("output", output, "a local path is lost on a cluster; give a URI")
    path = Path(output).expanduser()
    results = path / "results"
    for folder in (path, *path.parents):
        if folder.exists() and not folder.is_dir():
            raise JobError("output", output, f"{folder} is a file")
    if results.is_symlink() or (results.exists() and not results.is_dir()):
        raise JobError("output", output, f"{results} is not a folder")
    foreign = [file for file in results.glob("*") if not file.match("part-*.parquet")]
    if foreign:
        raise JobError("output", output, f"holds {foreign[0]}, which is not of a run")


@contextmanager
def open_run_folder(output: str) -> Iterator[RunFolder]:
    """The folder `output`, or a temporary one if it is empty or a URI.

    Raises `JobError` if another run is writing there. A run that fails leaves no partial results.
    """
    local = output and not is_uri(output)
    path = Path(output).expanduser().resolve() if local else Path(tempfile.mkdtemp(prefix="saturate-"))
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JobError("output", output, "another run is writing there") from None
    folder = RunFolder(path)
    try:
        shutil.rmtree(folder.staging, ignore_errors=True)
        folder.staging.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder.staging, ignore_errors=True)
        os.close(lock)


async def as_dir(folder: RunFolder, output: str) -> Dir[Any]:
    """The folder as a Flyte `Dir`, uploaded where `output` or the platform says."""
    return await Dir.from_local(folder.path, remote_destination=output if is_uri(output) else None)
