"""Answers of all chunks into the parts of the result, in input order, one chunk in memory at a time.

The invariant `rows_in = rows_ok + rows_failed`, with every id once and in the order of the input, is
checked on the files as written; a breach is an `AccountingError` and the run has no manifest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from flyte.io import File

from apps.errors import AccountingError
from tasks.manifest import Part
from tasks.score import Score, score_completion
from tasks.tables import ANSWER_SCHEMA

PART_BYTES = 64_000_000
"""A part is closed once it is this large."""
ROW_GROUP_ROWS = 10_000
ROW_GROUP_BYTES = 16_000_000
"""Chunks are gathered into row groups of this size, which readers scan faster than many small ones."""

PROMPT = pa.field("prompt", pa.string())
"""The rendered prompt, or the messages as JSON."""
RESULT_SCHEMA = pa.schema([ANSWER_SCHEMA.field("id"), PROMPT, *list(ANSWER_SCHEMA)[1:]])
SCORED_SCHEMA = pa.schema(
    [
        *RESULT_SCHEMA,
        pa.field("reference", pa.string()),
        pa.field("answer_strict", pa.string()),
        pa.field("answer_flexible", pa.string()),
        pa.field("correct_strict", pa.bool_()),
        pa.field("correct_flexible", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class AnsweredChunk:
    chunk: File[Any]
    answers: File[Any]


@dataclass
class Totals:
    """Counted on the written parts."""

    rows_ok: int = 0
    rows_failed: int = 0
    rows_truncated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows_scored: int = 0
    correct_strict: int = 0
    correct_flexible: int = 0
    parts: list[Part] = field(default_factory=list)


def collect(chunks: Iterable[AnsweredChunk], folder: Path, rows_in: int, scored: bool) -> Totals:
    """Writes `part-*.parquet` into `folder`. Blocks: call it off the event loop.

    Raises `AccountingError` unless the parts hold the ids of the chunks, `rows_in` of them, in order.
    """
    ids_in, ids_out = IdLog(), IdLog()
    with PartWriter(folder, SCORED_SCHEMA if scored else RESULT_SCHEMA) as writer:
        for answered in chunks:
            table = _join(_read(answered.chunk), _read(answered.answers), writer.schema)
            ids_in.add(table)
            writer.write(table)
    totals = Totals()
    for path in sorted(folder.glob("part-*.parquet")):
        totals.parts.append(_count_part(path, totals, ids_out))
    written, distinct = sum(part.rows for part in totals.parts), ids_out.num_distinct()
    if not rows_in == written == distinct or ids_out.digest() != ids_in.digest():
        raise AccountingError(
            f"{rows_in} rows went in, {written} were written with {distinct} ids, or others than these"
        )
    return totals


class IdLog:
    """Ids one after another, of which a digest of them all and 8 bytes each are kept."""

    def __init__(self) -> None:
        self._order = hashlib.sha256()
        self._hashes = array("q")

    def add(self, table: pa.Table) -> None:
        ids = table["id"].to_pylist()
        self._order.update("".join(f"{row_id}\0" for row_id in ids).encode())
        self._hashes.extend(map(hash, ids))

    def digest(self) -> bytes:
        return self._order.digest()

    def num_distinct(self) -> int:
        return int(pc.count_distinct(pa.array(self._hashes, pa.int64())).as_py())


class PartWriter:
    """Cuts a stream of tables into row groups and parts; a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._folder = folder
        self._num_parts = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._sink: pa.NativeFile | None = None
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._flush()
        self._close()

    def write(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()
        if self._sink is not None and self._sink.tell() >= PART_BYTES:
            self._close()

    def _flush(self) -> None:
        """Writes what is pending as one row group, opening a part if none is."""
        if not self._pending:
            return
        if self._writer is None:
            path = self._folder / f"part-{self._num_parts:05d}.parquet"
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, self.schema)
            self._num_parts += 1
        self._writer.write_table(pa.concat_tables(self._pending))
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0

    def _close(self) -> None:
        if self._writer is not None and self._sink is not None:
            self._writer.close()
            self._sink.close()
        self._writer = self._sink = None


def _read(file: File[Any]) -> pa.Table:
    with file.open_sync("rb") as source:
        return pq.read_table(pa.BufferReader(source.read()))


def _join(chunk: pa.Table, answers: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows of the result, scored where the schema asks for it."""
    if not chunk["id"].equals(answers["id"]):
        raise AccountingError(f"the answers to {chunk['id'][0]} ff. are to other rows")
    prompt = pc.coalesce(chunk["prompt"], chunk["messages"])
    columns = {**{name: answers[name] for name in answers.column_names}, "prompt": prompt}
    if "reference" in schema.names:
        columns["reference"] = chunk["reference"]
        columns |= _score(answers["text"], chunk["reference"])
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _score(texts: pa.ChunkedArray, references: pa.ChunkedArray) -> dict[str, pa.Array]:
    """Columns of `Score`, null where the row failed or has no reference."""
    names = [field.name for field in fields(Score)]
    scores = [
        None if text is None or reference is None else score_completion(text, reference)
        for text, reference in zip(texts.to_pylist(), references.to_pylist(), strict=True)
    ]
    return {
        name: pa.array([score and getattr(score, name) for score in scores], SCORED_SCHEMA.field(name).type)
        for name in names
    }


def _count_part(path: Path, totals: Totals, ids: IdLog) -> Part:
    """Adds one written part to `totals` and `ids`."""
    with pq.ParquetFile(path) as file:
        columns = [name for name in COUNTED if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            table = pa.table(batch)
            ids.add(table)
            failed = table.num_rows - table["error_kind"].null_count
            totals.rows_failed += failed
            totals.rows_ok += table.num_rows - failed
            totals.rows_truncated += _num_true(pc.equal(table["finish_reason"], "length"))
            totals.prompt_tokens += pc.sum(table["prompt_tokens"]).as_py() or 0
            totals.completion_tokens += pc.sum(table["completion_tokens"]).as_py() or 0
            if "correct_strict" in columns:
                totals.rows_scored += table.num_rows - table["correct_strict"].null_count
                totals.correct_strict += _num_true(table["correct_strict"])
                totals.correct_flexible += _num_true(table["correct_flexible"])
        num_rows = file.metadata.num_rows
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Part(path=f"results/{path.name}", rows=num_rows, sha256=sha256)


COUNTED = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error_kind",
    "correct_strict",
    "correct_flexible",
)


def _num_true(values: pa.ChunkedArray) -> int:
    return int(pc.sum(values).as_py() or 0)
