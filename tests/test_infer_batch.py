"""A chunk through the client: what was answered is kept, and only what was not is asked again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from apps.errors import EngineUnavailable
from apps.schema import RowResult, SamplingParams
from tasks.client import InferenceClient
from tasks.infer_batch import InferenceConfig, Sender, num_bytes, split_by_bytes, wire_row
from tasks.render import PromptRow

Answer = Callable[[list[dict[str, Any]]], httpx.Response]


@pytest.fixture(autouse=True)
def _passes_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)


def make_config(**overrides: Any) -> InferenceConfig:
    fields = {"model": "sim", "model_revision": "r1", "sampling": SamplingParams()}
    return InferenceConfig(**{**fields, **overrides})


def make_rows(num_rows: int) -> list[PromptRow]:
    return [PromptRow(id=str(number), prompt=f"Question {number}?") for number in range(num_rows)]


def lines(*results: RowResult, done: bool = True) -> httpx.Response:
    text = "".join(result.model_dump_json() + "\n" for result in results)
    return httpx.Response(200, text=text + ('{"done": true, "rows": 1}\n' if done else ""))


def ok(row: dict[str, Any]) -> RowResult:
    return RowResult(id=row["id"], text=f"answer {row['id']}", finish_reason="stop")


async def infer(answer: Answer, rows: list[PromptRow], max_passes: int = 3) -> list[RowResult]:
    def respond(request: httpx.Request) -> httpx.Response:
        return answer(json.loads(request.content)["rows"])

    sender = Sender(make_config(), "chunk", patience_s=10)
    async with InferenceClient("http://app.test", transport=httpx.MockTransport(respond)) as client:
        return await sender.infer_rows(client, rows, max_passes)


async def test_only_unanswered_rows_go_again_after_a_break() -> None:
    asked: list[list[str]] = []

    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        asked.append([row["id"] for row in rows])
        return lines(*(ok(row) for row in rows[:2]), done=len(rows) <= 2)

    results = await infer(answer, make_rows(5))
    assert asked == [["0", "1", "2", "3", "4"], ["2", "3", "4"], ["4"]]
    assert [result.text for result in results] == [f"answer {n}" for n in range(5)]


async def test_a_break_after_the_last_row_costs_nothing() -> None:
    asked: list[int] = []

    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        asked.append(len(rows))
        return lines(*(ok(row) for row in rows), done=False)

    results = await infer(answer, make_rows(3))
    assert [result.error_kind for result in results] == [None] * 3
    assert asked == [3]


async def test_only_retryable_rows_go_again_after_a_pass() -> None:
    asked: list[list[str]] = []

    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        asked.append([row["id"] for row in rows])
        kinds = {"1": "too_long", "2": "timeout"} if len(asked) == 1 else {}
        failed = [RowResult.failed(row["id"], kinds[row["id"]], "why") for row in rows if row["id"] in kinds]  # type: ignore[arg-type]  # a literal in a table
        return lines(*failed, *(ok(row) for row in rows if row["id"] not in kinds))

    results = await infer(answer, make_rows(4))
    assert asked == [["0", "1", "2", "3"], ["2"]]
    assert [result.error_kind for result in results] == [None, "too_long", None, None]


async def test_rows_that_failed_in_rendering_are_not_sent() -> None:
    asked: list[str] = []

    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        asked.extend(row["id"] for row in rows)
        return lines(*(ok(row) for row in rows))

    rows = [*make_rows(1), PromptRow(id="bad", error_kind="empty", error="nothing")]
    results = await infer(answer, rows)
    assert asked == ["0"]
    assert (results[1].id, results[1].error_kind, results[1].error) == ("bad", "empty", "nothing")


async def test_silence_from_the_start_ends_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        return httpx.Response(503, headers={"Retry-After": "60"}, text="starting")

    with pytest.raises(EngineUnavailable, match="starting"):
        await infer(answer, make_rows(2))


async def test_a_request_too_large_is_halved_down_to_the_row() -> None:
    asked: list[int] = []

    def answer(rows: list[dict[str, Any]]) -> httpx.Response:
        asked.append(len(rows))
        too_large = len(rows) > 2 or "3" in [row["id"] for row in rows]
        return httpx.Response(413, text="no") if too_large else lines(*(ok(row) for row in rows))

    results = await infer(answer, make_rows(5))
    assert [result.error_kind for result in results] == [None, None, None, "too_long", None]
    assert asked[0] == 5


def test_conversations_are_made_as_the_config_says() -> None:
    plain, chat = PromptRow("0", prompt="Hi"), PromptRow("1", messages='[{"role": "system", "content": "S"}]')
    user = {"role": "user", "content": "Hi"}
    assert wire_row(plain, make_config()) == {"id": "0", "messages": [user]}
    system = {"role": "system", "content": "Be brief."}
    config = make_config(system_prompt="Be brief.")
    assert wire_row(plain, config) == {"id": "0", "messages": [system, user]}
    assert wire_row(chat, config) == {"id": "1", "messages": [{"role": "system", "content": "S"}]}
    assert wire_row(plain, make_config(chat=False)) == {"id": "0", "prompt": "Hi"}


def test_groups_stay_below_the_limit_and_in_order() -> None:
    rows = [{"id": str(n), "prompt": "ü" * n} for n in range(60)]
    groups = list(split_by_bytes(rows, 300))
    assert [row for group in groups for row in group] == rows
    assert all(sum(map(num_bytes, group)) <= 300 or len(group) == 1 for group in groups)
    assert num_bytes({"id": "ü"}) == len('{"id":"ü"}'.encode())
