"""Answers into parts: the order of the input, one schema whatever fails, and every row accounted for."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flyte.io import File

import tasks.collect
from apps.errors import AccountingError
from apps.schema import RowResult
from tasks.collect import (
    RESULT_SCHEMA,
    SCORED_SCHEMA,
    AnsweredChunk,
    Totals,
    collect,
)
from tasks.render import PromptRow
from tasks.tables import ANSWER_SCHEMA, CHUNK_SCHEMA

names = itertools.count()


def make_file(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> File[Any]:
    path = folder / f"{next(names)}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    file: File[Any] = File.from_existing_remote(str(path))
    return file


def make_row(row_id: int, **overrides: Any) -> PromptRow:
    return PromptRow(**{"id": str(row_id), "prompt": f"prompt {row_id}", **overrides})


def make_result(row_id: int, **overrides: Any) -> RowResult:
    answer = {
        "id": str(row_id),
        "text": f"#### {row_id}",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": row_id,
    }
    return RowResult(**{**answer, **overrides})


def make_failure(row_id: int) -> RowResult:
    return RowResult.failed(str(row_id), "too_long", "5000 tokens")


def make_chunk(folder: Path, rows: list[PromptRow], results: list[RowResult]) -> AnsweredChunk:
    return AnsweredChunk(
        chunk=make_file(folder, [asdict(row) for row in rows], CHUNK_SCHEMA),
        answers=make_file(folder, [result.model_dump() for result in results], ANSWER_SCHEMA),
    )


def make_chunks(folder: Path, num_chunks: int, size: int) -> list[AnsweredChunk]:
    ids = [range(start, start + size) for start in range(0, num_chunks * size, size)]
    return [make_chunk(folder, [make_row(n) for n in of], [make_result(n) for n in of]) for of in ids]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "inputs").mkdir()
    return tmp_path / "inputs"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def read_ids(results: Path, totals: Totals) -> list[list[str]]:
    """Of each part, in the order of the manifest."""
    paths = [results.parent / part.path for part in totals.parts]
    return [pq.read_table(path)["id"].to_pylist() for path in paths]


def test_rows_keep_their_order(inputs: Path, results: Path) -> None:
    totals = collect(make_chunks(inputs, num_chunks=5, size=3), results, 15, scored=False)
    assert read_ids(results, totals) == [[str(n) for n in range(15)]]
    assert pq.read_schema(results / "part-00000.parquet").equals(RESULT_SCHEMA)


def test_row_holds_its_own_answer(inputs: Path, results: Path) -> None:
    rows = [make_row(7), make_row(8, prompt=None, messages='[{"role": "user"}]')]
    answers = [make_result(7, ttft_s=0.25), make_failure(8)]
    collect([make_chunk(inputs, rows, answers)], results, 2, scored=False)
    first, second = pq.read_table(results / "part-00000.parquet").to_pylist()
    assert first == {"prompt": "prompt 7", **make_result(7, ttft_s=0.25).model_dump()}
    assert second == {"prompt": '[{"role": "user"}]', **make_failure(8).model_dump()}


def test_parts_rotate_by_size(inputs: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.collect, "ROW_GROUP_ROWS", 4)
    monkeypatch.setattr(tasks.collect, "PART_BYTES", 1)
    totals = collect(make_chunks(inputs, num_chunks=5, size=2), results, 10, scored=False)
    assert read_ids(results, totals) == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]
    assert [part.path for part in totals.parts] == [f"results/part-0000{n}.parquet" for n in range(3)]


def test_small_chunks_share_a_row_group(inputs: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = make_chunks(inputs, num_chunks=6, size=1)
    collect(chunks, results, 6, scored=False)
    assert pq.read_metadata(results / "part-00000.parquet").num_row_groups == 1
    monkeypatch.setattr(tasks.collect, "ROW_GROUP_BYTES", 1)
    collect(chunks, results, 6, scored=False)
    assert pq.read_metadata(results / "part-00000.parquet").num_row_groups == 6


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
def test_schema_holds_when_every_row_fails(inputs: Path, results: Path, scored: bool) -> None:
    rows = [make_row(n, prompt=None, error_kind="empty", error="is empty") for n in range(3)]
    totals = collect(
        [make_chunk(inputs, rows, [make_failure(n) for n in range(3)])], results, 3, scored=scored
    )
    schema = pq.read_schema(results / "part-00000.parquet")
    assert schema.equals(SCORED_SCHEMA if scored else RESULT_SCHEMA)
    assert (totals.rows_ok, totals.rows_failed, totals.rows_scored) == (0, 3, 0)


def test_totals_count_what_was_written(inputs: Path, results: Path) -> None:
    answers = [make_result(1), make_result(2, finish_reason="length"), make_failure(3), make_result(4)]
    rows = [make_row(n) for n in range(1, 5)]
    chunks = [make_chunk(inputs, rows[:2], answers[:2]), make_chunk(inputs, rows[2:], answers[2:])]
    totals = collect(chunks, results, 4, scored=False)
    assert (totals.rows_ok, totals.rows_failed, totals.rows_truncated) == (3, 1, 1)
    assert (totals.prompt_tokens, totals.completion_tokens) == (30, 7)
    assert (totals.rows_scored, totals.correct_strict) == (0, 0)


def test_parts_carry_their_sha256(inputs: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.collect, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(tasks.collect, "PART_BYTES", 1)
    totals = collect(make_chunks(inputs, num_chunks=3, size=2), results, 6, scored=False)
    contents = [(results.parent / part.path).read_bytes() for part in totals.parts]
    assert [part.sha256 for part in totals.parts] == [hashlib.sha256(c).hexdigest() for c in contents]
    assert [part.rows for part in totals.parts] == [2, 2, 2]


def test_scores_stand_beside_their_rows(inputs: Path, results: Path) -> None:
    references = ["#### 0", "#### 1", "#### 9", None, "#### 4"]
    rows = [make_row(n, reference=reference) for n, reference in enumerate(references)]
    answers = [
        make_result(0),
        make_result(1, text="it is 1"),
        make_result(2),
        make_result(3),
        make_failure(4),
    ]
    totals = collect([make_chunk(inputs, rows, answers)], results, 5, scored=True)
    table = pq.read_table(results / "part-00000.parquet")
    assert table["correct_strict"].to_pylist() == [True, False, False, None, None]
    assert table["correct_flexible"].to_pylist() == [True, True, False, None, None]
    assert table["answer_strict"].to_pylist() == ["0", None, "2", None, None]
    assert table["answer_flexible"].to_pylist() == ["0", "1", "2", None, None]
    assert table["reference"].to_pylist() == references
    assert (totals.rows_scored, totals.correct_strict, totals.correct_flexible) == (3, 1, 2)


@pytest.mark.parametrize(
    "answered",
    [[1, 0, 2], [0, 1], [0, 1, 2, 3], [0, 1, 1], [0, 1, 7], []],
    ids=["swapped", "missing", "extra", "doubled", "other", "none"],
)
def test_answers_to_other_rows_are_fatal(inputs: Path, results: Path, answered: list[int]) -> None:
    rows = [make_row(n) for n in range(3)]
    chunk = make_chunk(inputs, rows, [make_result(n) for n in answered])
    with pytest.raises(AccountingError, match="to other rows"):
        collect([chunk], results, 3, scored=False)


@pytest.mark.parametrize("kept", [[0, 2], [0, 1, 1, 2], []], ids=["missing", "doubled", "none"])
def test_chunks_that_do_not_add_up_are_fatal(inputs: Path, results: Path, kept: list[int]) -> None:
    chunks = make_chunks(inputs, num_chunks=3, size=2)
    with pytest.raises(AccountingError, match=f"6 rows went in, {2 * len(kept)} were written"):
        collect([chunks[n] for n in kept], results, 6, scored=False)


def test_stray_part_is_fatal(inputs: Path, results: Path) -> None:
    collect(make_chunks(inputs, num_chunks=1, size=2), results, 2, scored=False)
    (results / "part-00000.parquet").rename(results / "part-00001.parquet")
    with pytest.raises(AccountingError, match="2 rows went in, 4 were written"):
        collect(make_chunks(inputs, num_chunks=1, size=2), results, 2, scored=False)


def test_row_that_stands_twice_is_fatal(inputs: Path, results: Path) -> None:
    (chunk,) = make_chunks(inputs, num_chunks=1, size=2)
    with pytest.raises(AccountingError):
        collect([chunk, chunk], results, 4, scored=False)


def test_no_chunks_make_no_parts(results: Path) -> None:
    assert collect([], results, 0, scored=True) == Totals()
    assert list(results.iterdir()) == []
