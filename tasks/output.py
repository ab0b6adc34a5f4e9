"""Where a run's files go, and how they become visible: written beside, then renamed.

A run's folder holds `results/part-*.parquet`, `manifest.json`, a marker, and under `--local` `app.log`. A
folder without the marker is somebody else's and is left alone unless it is empty. One with a manifest is
whole: `commit` sets the former run aside, puts the new one in its place and the manifest last, and a
commit that was interrupted is undone when the folder is next opened.
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

from flyte import storage
from flyte.io import Dir

from apps.errors import JobError
from tasks.manifest import Manifest

MARKER = ".saturate-run"
"""An empty file that says whose folder it is."""


class RunFolder:
    """The local folder of one run, held by this run alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.app_log = path / "app.log"
        self.staging = path / "results.partial"
        """Parts are written here until `commit`."""
        self._results = path / "results"
        self._manifest = path / "manifest.json"
        self._partial_manifest = path / "manifest.json.partial"
        self._former_results = path / "results.former"
        self._former_manifest = path / "manifest.former.json"

    def commit(self, manifest: Manifest) -> None:
        if self._manifest.exists():
            self._manifest.rename(self._former_manifest)
            if self._results.exists():
                self._results.rename(self._former_results)
        self.staging.rename(self._results)
        self._partial_manifest.write_text(manifest.model_dump_json(indent=2) + "\n")
        self._partial_manifest.rename(self._manifest)
        self._drop_former()

    def open(self) -> None:
        """Undoes an interrupted commit and makes an empty staging folder."""
        self.close()
        if not self._manifest.exists():
            shutil.rmtree(self._results, ignore_errors=True)
        self.staging.mkdir()

    def close(self) -> None:
        """Leaves what `commit` put in place, or else the former run."""
        shutil.rmtree(self.staging, ignore_errors=True)
        if self._former_manifest.exists() and not self._manifest.exists():
            if self._former_results.exists():
                shutil.rmtree(self._results, ignore_errors=True)
                self._former_results.rename(self._results)
            self._former_manifest.rename(self._manifest)
        self._drop_former()

    def _drop_former(self) -> None:
        shutil.rmtree(self._former_results, ignore_errors=True)
        self._former_manifest.unlink(missing_ok=True)
        self._partial_manifest.unlink(missing_ok=True)


def is_uri(output: str) -> bool:
    return "://" in output


def check_output(output: str, dataset: str, is_local: bool) -> None:
    """Raises `JobError` for an output that cannot be written to; writes nothing."""
    if not output:
        return
    if is_uri(output):
        if storage.get_underlying_filesystem(path=output).exists(output):
            raise JobError("output", output, "exists already")
        return
    if not is_local:
        raise JobError("output", output, "a local path is lost on a cluster; give a URI")
    path = Path(output).expanduser().resolve()
    for folder in (path, *path.parents):
        if folder.exists() and not folder.is_dir():
            raise JobError("output", output, f"{folder.name} is a file")
    if path.exists() and any(path.iterdir()) and not (path / MARKER).exists():
        raise JobError("output", output, "is not empty and not of an earlier run")
    if Path(dataset).expanduser().resolve().is_relative_to(path):
        raise JobError("output", output, f"the data set {dataset} lies in it")


@contextmanager
def open_run_folder(output: str) -> Iterator[RunFolder]:
    """The folder `output`, or a temporary one if it is empty or a URI.

    Raises `JobError` if it cannot be made, or if another run is writing there. A run that fails leaves
    no partial results, and the temporary folder of a URI is gone afterwards.
    """
    local = output and not is_uri(output)
    try:
        path = Path(output).expanduser().resolve() if local else Path(tempfile.mkdtemp(prefix="saturate-"))
        existed = path.exists()
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).touch()
    except OSError as exc:
        raise JobError("output", output, exc.strerror or str(exc)) from exc
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JobError("output", output, "another run is writing there") from None
    folder = RunFolder(path)
    try:
        folder.open()
        yield folder
    finally:
        folder.close()
        if is_uri(output):
            shutil.rmtree(path)
        elif [child.name for child in path.iterdir()] == [MARKER]:
            (path / MARKER).unlink()
            if not existed:
                path.rmdir()
        os.close(lock)


async def as_dir(folder: RunFolder, output: str) -> Dir[Any]:
    """The folder as a Flyte `Dir`: uploaded to a URI, with the manifest last, else where Flyte keeps data."""
    if not is_uri(output):
        return await Dir.from_local(folder.path)
    await storage.put(str(folder.path / "results"), f"{output}/results", recursive=True)
    await storage.put(str(folder.path / "manifest.json"), f"{output}/manifest.json")
    return Dir.from_existing_remote(output)
