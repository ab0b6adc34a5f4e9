"""GSM8K scoring as lm-evaluation-harness defines it (`lm_eval/tasks/gsm8k/gsm8k.yaml`).

strict: the number after the first `####`. flexible: the last number anywhere. Numbers are compared as
numbers: commas, a dollar sign and a final full stop do not count, and 3.50 equals 3.5.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Score:
    """`answer_*` is the number found, `None` if there is none."""

    answer_strict: str | None
    answer_flexible: str | None
    correct_strict: bool
    correct_flexible: bool


def score_completion(text: str, reference: str) -> Score | None:
    """`reference` is a worked solution that ends in `#### n`, or the number; `None` if it has none."""
    target = parse_number(reference.rpartition("####")[2])
    if target is None:
        return None
    strict, flexible = extract_strict(text), extract_flexible(text)
    return Score(
        answer_strict=strict,
        answer_flexible=flexible,
        correct_strict=strict is not None and parse_number(strict) == target,
        correct_flexible=flexible is not None and parse_number(flexible) == target,
    )


def extract_strict(text: str) -> str | None:
    match = STRICT.search(text)
    return match[1] if match else None


def extract_flexible(text: str) -> str | None:
    matches = FLEXIBLE.findall(text)
    return (matches[-1][0] or matches[-1][1]) if matches else None


def parse_number(text: str) -> Decimal | None:
    """`$1,000.` is 1000; `None` if what is left is no number."""
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def wilson_interval(num_correct: int, num_scored: int) -> tuple[float, float]:
    """95 % interval of a proportion, as Wilson (1927); (0, 1) if nothing was scored."""
    if not num_scored:
        return 0.0, 1.0
    share, z2 = num_correct / num_scored, Z_95**2
    centre = share + z2 / (2 * num_scored)
    spread = Z_95 * math.sqrt(share * (1 - share) / num_scored + z2 / (4 * num_scored**2))
    scale = 1 + z2 / num_scored
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
