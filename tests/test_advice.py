"""Advice from the figures of an interval, and the loop that logs both; no test waits."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Iterable
from typing import Any

import pytest

from apps.advice import Interval, advise, watch_use
from apps.metrics import Latencies
from apps.schema import RowResult
from apps.settings import AppSettings
from tests.stats import make_stats
from workflows.gsm8k import main

BEFORE = make_stats(
    elapsed_s=100.0, busy_s=40.0, saturated_s=30.0, admitted=1_000, completed=900, failed={"empty": 2}
)
SATURATED: dict[str, Any] = {"busy_s": 10.0, "saturated_s": 9.5, "queued": 400}


def make_after(before: dict[str, Any] = BEFORE, **grown: Any) -> dict[str, Any]:
    """Ten seconds later: a saturated engine that admitted and finished 200 rows, in full batches."""
    typical = {
        **SATURATED,
        "elapsed_s": 10.0,
        "admitted": 200,
        "completed": 200,
        "total_batches": 4,
        "total_completed": 200,
        "total_batch_cost": 100_000,
        "completion_tokens": 20_000,
        "prompt_tokens": 10_000,
    }
    return {**before, **{key: before[key] + more for key, more in {**typical, **grown}.items()}}


def advice_on(before: dict[str, Any] = BEFORE, **grown: Any) -> list[str]:
    return advise(Interval.between(before, make_after(before, **grown)), AppSettings(batch_timeout_s=0.05))


def test_an_interval_is_what_grew_between_two_readings() -> None:
    after = {**make_after(rejected=50, in_flight=512), "failed": {"empty": 3, "timeout": 4}}
    assert Interval.between(BEFORE, after) == Interval(
        seconds=10.0,
        busy_fraction=1.0,
        saturated_fraction=0.95,
        admitted=200,
        finished=205,
        rejected=50,
        prompt_tokens=10_000,
        completion_tokens=20_000,
        batches=4,
        batched_rows=200,
        batched_tokens=100_000,
        queued=(0, 400),
        in_flight=512,
        max_in_flight=512,
    )


def test_a_saturated_engine_needs_no_advice() -> None:
    assert advice_on(rejected=50, saturated_s=9.0) == []


def test_no_traffic_needs_no_advice() -> None:
    assert advise(Interval.between(BEFORE, {**BEFORE, "elapsed_s": 110.0}), AppSettings()) == []


def test_room_beside_an_empty_queue_asks_for_concurrency() -> None:
    (line,) = advice_on(saturated_s=6.0, in_flight=90)
    assert all(figure in line for figure in ("max_concurrency", "chunk_size", "40%", "90 of 512"))


def test_rows_that_wait_are_not_for_want_of_concurrency() -> None:
    assert advice_on({**BEFORE, "queued": 30}, saturated_s=6.0) == []


SMALL_BATCHES: dict[str, Any] = {"total_batches": 100, "total_completed": 200, "total_batch_cost": 100_000}


def test_small_batches_that_wait_ask_for_a_shorter_timeout() -> None:
    (line,) = advice_on({**BEFORE, "queued": 30}, saturated_s=6.0, **SMALL_BATCHES)
    assert all(figure in line for figure in ("SATURATE_BATCH_TIMEOUT_S", "0.05", "2.0 rows", "64", "50%"))


@pytest.mark.parametrize(
    "grown",
    [{"total_batches": 9}, {"total_completed": 3_200}, {"total_batch_cost": 1_600_000}],
    ids=["few batches", "full of rows", "full of tokens"],
)
def test_batches_that_lose_no_time_keep_their_timeout(grown: dict[str, Any]) -> None:
    assert advice_on({**BEFORE, "queued": 30}, saturated_s=6.0, **{**SMALL_BATCHES, **grown}) == []


def test_rejected_rows_ask_for_a_larger_queue() -> None:
    (line,) = advice_on({**BEFORE, "queued": 30}, saturated_s=8.0, rejected=50)
    assert all(figure in line for figure in ("SATURATE_MAX_QUEUE_SIZE", "5000", "50 rows", "80%"))


def test_an_empty_engine_asks_for_more_data() -> None:
    (line,) = advice_on(busy_s=3.0, saturated_s=2.8)
    assert all(figure in line for figure in ("70%", "drivers", "max_concurrency"))


def test_advice_names_settings_that_exist() -> None:
    lines = advice_on(busy_s=7.0, saturated_s=3.0, rejected=50, **SMALL_BATCHES)
    settings = {name.lower() for line in lines for name in re.findall(r"SATURATE_(\w+)", line)}
    inputs = {name for line in lines for name in re.findall(r"max_concurrency|chunk_size", line)}
    assert len(lines) == 4
    assert settings == {"batch_timeout_s", "max_queue_size"} <= AppSettings.model_fields.keys()
    assert inputs == {"max_concurrency", "chunk_size"} <= inspect.signature(main.func).parameters.keys()


async def logged(
    readings: Iterable[dict[str, Any]], caplog: pytest.LogCaptureFixture, latencies: Latencies | None = None
) -> list[tuple[int, str]]:
    """Level and text of what `watch_use` logs, stopped when the readings run out."""
    remaining = list(readings)

    async def sleep(interval_s: float) -> None:
        assert interval_s == 10.0
        if not remaining:
            raise asyncio.CancelledError

    with caplog.at_level(logging.INFO, logger="apps.advice"), pytest.raises(asyncio.CancelledError):
        await watch_use(
            lambda: remaining.pop(0), latencies or Latencies(), AppSettings(), interval_s=10.0, sleep=sleep
        )
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def intervals(*grown: dict[str, Any]) -> list[dict[str, Any]]:
    """Readings of which each has grown over the one before."""
    readings = [BEFORE]
    for more in grown:
        readings.append(make_after(readings[-1], **more))
    return readings


IDLE = dict.fromkeys(make_after().keys() - {"failed", "elapsed_s"}, 0)
THIN = {**SATURATED, "busy_s": 6.0, "saturated_s": 5.8}


async def test_each_interval_with_traffic_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    latencies = Latencies()
    for e2e_s in (10.0, 20.0):
        latencies.observe(RowResult(id="a", completion_tokens=5, queued_s=1.0, ttft_s=2.0, e2e_s=e2e_s))
    lines = await logged(intervals({"in_flight": 512}, IDLE), caplog, latencies)
    assert lines == [
        (
            logging.INFO,
            "20.0 rows/s, 1000 prompt and 2000 completion tokens/s; engine busy 100%, saturated 95%; "
            "400 rows wait, 512 run; TTFT p50 2 s, p95 2 s; E2E p50 15 s, p95 19.5 s",
        )
    ]


async def test_times_are_left_out_before_the_first_row(caplog: pytest.LogCaptureFixture) -> None:
    ((_, line),) = await logged(intervals({"in_flight": 512}), caplog)
    assert line.endswith("400 rows wait, 512 run")


async def test_a_thin_job_is_advised_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    lines = await logged(intervals(THIN, THIN, THIN, THIN), caplog)
    info, warning = logging.INFO, logging.WARNING
    assert [level for level, _ in lines] == [info, info, info, warning, info, warning]
    assert lines[3][1].startswith("within 10 s: the engine stood empty for 40% of the time")


async def test_the_ends_of_a_job_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    tail = {"admitted": 0, "saturated_s": 0.0}
    lines = await logged(intervals(IDLE, THIN, {}, {}, THIN, tail, tail, tail, IDLE), caplog)
    assert [level for level, _ in lines] == [logging.INFO] * 7
