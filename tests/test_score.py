"""Scoring agrees with lm-evaluation-harness on what it finds, and compares numbers as numbers."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tasks.score import extract_flexible, extract_strict, parse_number, score_completion, wilson_interval


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("2 + 16 = 18\n#### 18", "18", "18"),
        ("#### 1,000", "1,000", "1,000"),
        ("It costs $18.00", None, "$18.00"),
        ("#### $18", None, "$18"),
        ("#### -3", "-3", "-3"),
        ("#### 3.50", "3.50", "3.50"),
        ("#### 18.", "18.", "18."),
        ("The answer is 7", None, "7"),
        ("The answer is -7.", None, "-7."),
        ("#### 4\n#### 5", "4", "5"),
        ("#### 18 apples, of which 2 are red", "18", "2"),
        ("####18", None, "18"),
        ("#### eighteen", None, None),
        ("no number at all", None, None),
        ("", None, None),
        ("I count 12, then ...", None, "..."),
    ],
    ids=[
        "worked-solution",
        "thousands",
        "dollars",
        "dollars-after-marks",
        "negative",
        "decimal",
        "full-stop",
        "no-marks",
        "no-marks-negative",
        "several-marks",
        "text-after",
        "no-space",
        "word",
        "no-number",
        "empty",
        "dots-count-as-number",
    ],
)
def test_answer_is_extracted(text: str, strict: str | None, flexible: str | None) -> None:
    assert extract_strict(text) == strict
    assert extract_flexible(text) == flexible


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", Decimal(1000)),
        ("$18.00", Decimal(18)),
        ("-3", Decimal(-3)),
        ("-$3", Decimal(-3)),
        ("3.50", Decimal("3.5")),
        (" 18. ", Decimal(18)),
        ("18..", None),
        ("0.1", Decimal("0.1")),
        ("1.2.3", None),
        (".", None),
        ("", None),
        ("sNaN", None),
        ("Infinity", None),
    ],
)
def test_number_is_parsed(text: str, number: Decimal | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "reference", "correct_strict", "correct_flexible"),
    [
        ("#### 18", "9 x 2 = 18\n#### 18", True, True),
        ("#### 18", "18", True, True),
        ("#### 1,000", "1000", True, True),
        ("#### 3.50", "#### 3.5", True, True),
        ("#### -3.", "#### -3", True, True),
        ("#### $18", "#### 18", False, True),
        ("so it is $18.00", "#### 18", False, True),
        ("#### 18 of 20", "#### 18", True, False),
        ("#### 4\n#### 5", "#### 4", True, False),
        ("#### 4\n#### 5", "#### 5", False, True),
        ("#### 3", "#### -3", False, False),
        ("#### 180", "#### 18", False, False),
        ("no number", "#### 18", False, False),
    ],
)
def test_completion_is_scored(
    text: str, reference: str, correct_strict: bool, correct_flexible: bool
) -> None:
    score = score_completion(text, reference)
    assert score is not None
    assert (score.correct_strict, score.correct_flexible) == (correct_strict, correct_flexible)
    assert (score.answer_strict, score.answer_flexible) == (extract_strict(text), extract_flexible(text))


@pytest.mark.parametrize("reference", ["unknown", "", "#### ", "sNaN"])
def test_reference_without_a_number_is_not_scored(reference: str) -> None:
    assert score_completion("#### 18", reference) is None


@pytest.mark.parametrize(
    ("num_correct", "num_scored", "low", "high"),
    [
        (97, 100, 0.9155, 0.9897),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_has_known_values(num_correct: int, num_scored: int, low: float, high: float) -> None:
    assert wilson_interval(num_correct, num_scored) == pytest.approx((low, high), abs=5e-5)
