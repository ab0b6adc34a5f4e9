"""Files into rows: nothing coerced, nothing dropped, and what is wrong is named with its line."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apps.errors import JobError
from tasks.load import Source, load_rows


def make_file(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(dataset: str) -> list[dict[str, Any]]:
    return list(load_rows(Source(dataset)))


def read_error(dataset: str) -> str:
    with pytest.raises(JobError) as caught:
        read(dataset)
    assert caught.value.field == "dataset"
    return str(caught.value)


@pytest.mark.parametrize(
    "values",
    [[1, 2.5, -0.0], ["007", "1e3", ""], [True, None], [["a"], {"b": [None]}], ["\u2028\x85\u2029", "é\n😀"]],
    ids=["numbers", "text", "constants", "nested", "separators"],
)
def test_jsonl_values_are_kept(tmp_path: Path, values: list[Any]) -> None:
    lines = [json.dumps({"value": value}, ensure_ascii=False) for value in values]
    rows = read(make_file(tmp_path, "rows.jsonl", "\n".join(lines)))
    assert [(row["value"], type(row["value"])) for row in rows] == [(v, type(v)) for v in values]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n',
        b'{"n": 1}\n\n   \n\t\n{"n": 2}\n\n',
        b'{"n": 1}\r\n{"n": 2}\r\n',
        b'{"n": 1}\n{"n": 2}',
    ],
    ids=["byte-order-mark", "blank-lines", "windows", "no-last-newline"],
)
def test_jsonl_layout_does_not_matter(tmp_path: Path, content: bytes) -> None:
    assert read(make_file(tmp_path, "rows.jsonl", content)) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("third", "reason"),
    [
        (b'{"n": ', "line 3 is not JSON"),
        (b'{"n": 1} {"n": 2}', "line 3 is not JSON"),
        (b'{"n": "\xff"}', "line 3 is not JSON: 'utf-8'"),
        (b"[1, 2]", "line 3 is not a JSON object"),
        (b"null", "line 3 is not a JSON object"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ],
    ids=["cut-off", "two-values", "not-utf-8", "list", "null", "too-deep"],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, third: bytes, reason: str) -> None:
    dataset = make_file(tmp_path, "rows.jsonl", b'{"n": 1}\n\n' + third + b'\n{"n": 2}\n')
    message = read_error(dataset)
    assert message.startswith(f"dataset={dataset!r}: {reason}")
    assert "\n" not in message


def test_rows_before_a_bad_line_are_read(tmp_path: Path) -> None:
    rows = load_rows(Source(make_file(tmp_path, "rows.jsonl", '{"n": 1}\noops\n')))
    assert next(rows) == {"n": 1}
    with pytest.raises(JobError, match="line 2"):
        next(rows)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order-mark"])
def test_csv_values_stay_text(tmp_path: Path, mark: str) -> None:
    rows = read(make_file(tmp_path, "rows.csv", f"{mark}id,n\n007,1.50\n 8,\n"))
    assert rows == [{"id": "007", "n": "1.50"}, {"id": " 8", "n": ""}]


def test_quoted_csv_newlines_are_kept(tmp_path: Path) -> None:
    content = 'id,prompt\n1,"two\nlines, one ""comma"""\r\n2,"a\r\nb\u2028c"\n'
    rows = read(make_file(tmp_path, "rows.csv", content))
    assert [row["prompt"] for row in rows] == ['two\nlines, one "comma"', "a\r\nb\u2028c"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'a,b\n1,"x\ny"\n2\n3,z\n', "line 4 does not have 2 fields"),
        (b"a,b\n1,2\n3,4,5\n", "line 3 does not have 2 fields"),
        (b'a,b\n1,2\n3,"open\n4,5\n', "line 3: unexpected end of data"),
        (b'a,b\n1,2\n3,"shut" too early\n4,5\n', "line 3: ',' expected after '\"'"),
        (b"a,b\n1,2\n3,\xff\n", "not UTF-8"),
        (b"a,b,a\n1,2,3\n", "two columns have one name: a, b, a"),
    ],
    ids=["too-few", "too-many", "quote-never-closed", "text-after-quote", "not-utf-8", "same-name"],
)
def test_bad_csv_line_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    dataset = make_file(tmp_path, "rows.csv", content)
    assert read_error(dataset).startswith(f"dataset={dataset!r}: {reason}")


def test_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    assert read(make_file(tmp_path, "ROWS.JSONL", b'{"a": 1}')) == [{"a": 1}]


def test_long_csv_field_is_read(tmp_path: Path) -> None:
    (row,) = read(make_file(tmp_path, "rows.csv", "prompt\n" + "x" * 200_000 + "\n"))
    assert len(row["prompt"]) == 200_000


def test_parquet_values_are_kept(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 31)
    rows = [{"n": n, "text": f"{n:03}", "deep": [{"a": None}], "day": day} for n in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    assert read(str(tmp_path / "rows.parquet")) == rows


def test_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": range(1000)}), path, use_dictionary=False, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    assert read_error(str(path)).startswith(f"dataset={str(path)!r}: not a Parquet file: ")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.parquet", b"id,n\n1,2\n", "not a Parquet file"),
        ("rows.parquet", b"", "not a Parquet file"),
        ("rows.txt", b"hello\n", "unknown file type '.txt', known are .jsonl, .csv, .parquet"),
        ("rows", b"hello\n", "unknown file type ''"),
        ("rows.jsonl", None, "no such file"),
        ("rows", None, "no such file"),
    ],
    ids=["not-parquet", "empty-parquet", "text", "no-suffix", "missing-jsonl", "missing"],
)
def test_unusable_file_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    dataset = str(tmp_path / name) if content is None else make_file(tmp_path, name, content)
    message = read_error(dataset)
    assert message.startswith(f"dataset={dataset!r}: {reason}")
    assert "\n" not in message


def test_missing_relative_file_is_no_hub_id() -> None:
    assert read_error("missing/rows.jsonl").endswith("no such file")
    assert read_error("./missing").endswith("no such file")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read(make_file(tmp_path, name, "")) == []
