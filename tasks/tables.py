"""The files between the steps: their columns, and how they are written and read.

A chunk holds consecutive rows on their way to the app, an answer file the results of one chunk, row for
row. Both are Parquet with a fixed schema whatever fails, and a chunk carries its content hash.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from flyte.io import File

from apps.schema import RowResult
from tasks.render import PromptRow

CHUNK_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("reference", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
    ]
)
ANSWER_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("queued_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("e2e_s", pa.float64()),
    ]
)


async def write_chunk(rows: Sequence[PromptRow]) -> File[Any]:
    return await _write(pa.Table.from_pylist([asdict(row) for row in rows], CHUNK_SCHEMA), "chunk")


async def write_answers(results: Sequence[RowResult]) -> File[Any]:
    rows = [result.model_dump() for result in results]
    return await _write(pa.Table.from_pylist(rows, ANSWER_SCHEMA), "answers")


async def read_chunk(chunk: File[Any]) -> list[PromptRow]:
    return [PromptRow(**row) for row in (await read_table(chunk)).to_pylist()]


async def read_table(file: File[Any]) -> pa.Table:
    async with file.open("rb") as source:
        content = await source.read()
    return pq.read_table(pa.BufferReader(bytes(content)))


async def _write(table: pa.Table, name: str) -> File[Any]:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    content = buffer.getvalue()
    file: File[Any] = File.new_remote(f"{name}.parquet", hash_method=hashlib.sha256(content).hexdigest())
    async with file.open("wb") as sink:
        await sink.write(content)
    return file
