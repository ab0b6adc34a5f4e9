"""What is kept of late answers: bounded in number, text and age."""

from __future__ import annotations

import pytest

import apps.recent
from apps.recent import MAX_AGE_S, Recent
from apps.schema import RowResult


def make_result(row_id: str, text: str = "four") -> RowResult:
    return RowResult(id=row_id, text=text, finish_reason="stop")


def test_an_answer_is_kept_until_it_is_old() -> None:
    now = 0.0
    recent = Recent(lambda: now)
    recent.put(b"a", make_result("a"))
    now = MAX_AGE_S
    assert recent.get(b"a") == make_result("a")
    now += 1
    assert recent.get(b"a") is None


def test_the_oldest_answers_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.recent, "MAX_RESULTS", 2)
    recent = Recent()
    for key in (b"a", b"b", b"c"):
        recent.put(key, make_result(key.decode()))
    assert [recent.get(key) is not None for key in (b"a", b"b", b"c")] == [False, True, True]


def test_text_is_bounded_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.recent, "MAX_CHARS", 10)
    recent = Recent()
    for _ in range(5):
        recent.put(b"a", make_result("a", "x" * 6))
    recent.put(b"b", make_result("b", "y" * 4))
    assert recent.get(b"a") is not None
    recent.put(b"c", make_result("c", "z"))
    assert [recent.get(key) is not None for key in (b"a", b"b", b"c")] == [False, True, True]
