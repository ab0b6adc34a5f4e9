"""Templated grade-school word problems with worked answers, in the field names and form of GSM8K.

A stream of problems is fixed by its seed. Whether a problem belongs to training or is held out
depends on a hash of its question alone, so the two sets share no question whatever the seeds.

    python problems.py > problems.jsonl
"""

import hashlib
import json
import operator
import random
from collections.abc import Callable, Iterator
from typing import Literal, TypedDict

from templates import CONTAINERS, ITEMS, NAMES, PLACES, TEMPLATES, Template

HELD_OUT_SEED = 1
HELD_OUT_COUNT = 1000
LARGEST_RESULT = 999

Split = Literal["train", "held_out"]

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


class Problem(TypedDict):
    """`answer` is one calculation a line, then `#### ` and the result of the last one."""

    question: str
    answer: str


def split_of(question: str) -> Split:
    """One question in ten is held out."""
    digest = hashlib.sha256(question.encode()).digest()
    return "held_out" if digest[0] % 10 == 0 else "train"


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """An endless stream, in which a question may come again."""
    rng = random.Random(seed)
    while True:
        problem = _problem(rng)
        if split_of(problem["question"]) == split:
            yield problem


def held_out(count: int = HELD_OUT_COUNT, seed: int = HELD_OUT_SEED) -> list[Problem]:
    """The first `count` different held-out problems of the seed."""
    by_question: dict[str, Problem] = {}
    for problem in problems(seed, "held_out"):
        by_question[problem["question"]] = problem
        if len(by_question) == count:
            break
    return list(by_question.values())


def _problem(rng: random.Random) -> Problem:
    template = rng.choice(TEMPLATES)
    numbers, lines = _worked(template, rng)
    question = rng.choice(template.wordings).format(**_words(rng), **numbers)
    result = lines[-1].split()[-1]
    return {"question": question, "answer": "\n".join([*lines, f"#### {result}"])}


def _words(rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(NAMES, 2)
    item, second = rng.sample(ITEMS, 2)
    place, container = rng.choice(PLACES), rng.choice(CONTAINERS)
    return {
        "name": name,
        "other": other,
        "item": item,
        "second": second,
        "place": place,
        "container": container,
    }


def _worked(template: Template, rng: random.Random) -> tuple[dict[str, int], list[str]]:
    """Numbers, drawn until every step gives a whole number from 1 to the largest, and the steps."""
    while True:
        numbers = {name: rng.randint(*bounds) for name, bounds in template.ranges.items()}
        lines = _calculations(template.steps, numbers)
        if lines is not None:
            return numbers, lines


def _calculations(steps: tuple[str, ...], numbers: dict[str, int]) -> list[str] | None:
    """Each step as `12 + 7 = 19`; None where a result is out of range or not a whole number."""
    values = dict(numbers)
    lines = []
    for position, step in enumerate(steps, start=1):
        left_name, symbol, right_name = step.split()
        left, right = _value(left_name, values), _value(right_name, values)
        result = OPERATORS[symbol](left, right)
        if not 1 <= result <= LARGEST_RESULT or (symbol == "/" and left % right):
            return None
        values[f"r{position}"] = result
        lines.append(f"{left} {symbol} {right} = {result}")
    return lines


def _value(operand: str, values: dict[str, int]) -> int:
    return int(operand) if operand.isdigit() else values[operand]


if __name__ == "__main__":
    for held_out_problem in held_out():
        print(json.dumps(held_out_problem))
