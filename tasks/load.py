"""A data set as an iterator of rows, from the Hub or from a file.

A row is a dict from column name to Python value, as the source has it: nothing is coerced, so that a
number where text was expected is seen and not silently turned into text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tenacity

from apps.errors import JobError
from apps.schema import MAX_REQUEST_BYTES

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A Hub id with its configuration, split and revision, or the path of one file."""

    dataset: str
    config: str = ""
    split: str = "train"
    revision: str = ""


def load_rows(source: Source) -> Rows:
    """Opens the source and yields its rows in order; raises `JobError` naming what cannot be used."""
    if not source.dataset:
        raise JobError("dataset", "", "is empty")
    path = Path(source.dataset).expanduser()
    if path.is_file():
        return _read_file(source.dataset, path)
    if path.suffix.lower() in READERS or source.dataset.startswith(("/", ".", "~")):
        raise JobError("dataset", source.dataset, "no such file")
    return iter(_load_from_hub(source))


def _read_file(dataset: str, path: Path) -> Rows:
    if path.suffix.lower() not in READERS:
        known = ", ".join(READERS)
        raise JobError("dataset", dataset, f"unknown file type {path.suffix!r}, known are {known}")
    return READERS[path.suffix.lower()](path)


def _read_jsonl(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as exc:
                raise JobError("dataset", str(path), f"line {number} is not JSON: {exc}") from exc
            if not isinstance(row, dict):
                raise JobError("dataset", str(path), f"line {number} is not a JSON object")
            yield row


def _read_csv(path: Path) -> Rows:
    """Every value is text, as it stands in the file; a quote that is never closed is an error."""
    csv.field_size_limit(MAX_REQUEST_BYTES)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            if len(set(names)) != len(names):
                raise JobError("dataset", str(path), f"two columns have one name: {', '.join(names)}")
            for row in reader:
                if None in row or None in row.values():
                    reason = f"line {reader.line_num} does not have {len(names)} fields"
                    raise JobError("dataset", str(path), reason)
                yield row
        except csv.Error as exc:
            reason = f"line {reader.line_num + 1}: {exc}"
            raise JobError("dataset", str(path), reason) from exc
        except UnicodeDecodeError as exc:
            raise JobError("dataset", str(path), f"not UTF-8: {exc}") from exc


def _read_parquet(path: Path) -> Rows:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, ValueError) as exc:
        raise JobError("dataset", str(path), f"not a Parquet file: {_first_line(exc)}") from exc


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0] or repr(exc)


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _load_from_hub(source: Source) -> Any:
    """The split, memory-mapped from the local cache.

    The Hub client retries most answers by itself, but neither a 500 for a revision nor one for a
    download; both are asked for again here.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx

    datasets.disable_progress_bars()

    def is_transient(exc: BaseException) -> bool:
        if isinstance(exc, HfHubHTTPError):
            return exc.response.status_code in (408, 429) or exc.response.status_code >= 500
        return isinstance(exc, (ConnectionError, httpx.TransportError))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(5),
        wait=tenacity.wait_exponential_jitter(initial=1, max=30),
        reraise=True,
    )
    unusable = (datasets.exceptions.DatasetsError, httpx.HTTPError, OSError, RuntimeError, ValueError)
    try:
        return retrying(
            datasets.load_dataset,
            source.dataset,
            source.config or None,
            split=source.split,
            revision=source.revision or None,
        )
    except unusable as exc:
        raise JobError("dataset", source.dataset, _first_line(exc)) from exc
