"""Admission over the simulated engine: budgets, isolation, aborts, and the batcher's ways of hanging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from apps.admission import Admission
from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineError, EngineOverloaded, EngineTimeout, EngineUnavailable, PromptError
from apps.jobs import Ask, parse_asks
from apps.schema import RawRow, RowResult, SamplingParams
from apps.settings import AppSettings
from tests.engines import FaultyEngine, HeldEngine, make_row, make_settings, until

SAMPLING = SamplingParams(max_tokens=32)


@asynccontextmanager
async def admitting(engine: SimulatedEngine, settings: AppSettings) -> AsyncIterator[Admission]:
    async with Admission(engine, settings) as admission:
        yield admission
    await engine.close()


def make_ask(number: int = 0, task_id: str = "") -> Ask:
    return parse_asks([make_row(str(number), f"Question {number}?")], SAMPLING, task_id)[0][0]


async def run_rows(admission: Admission, prompts: list[object]) -> list[RowResult]:
    rows = [make_row(str(number), prompt) for number, prompt in enumerate(prompts)]
    return await answer(admission, rows)


async def answer(admission: Admission, rows: list[RawRow], task_id: str = "") -> list[RowResult]:
    """Waits for all rows, as a request does; when cancelled, leaves them."""
    asks, errors = parse_asks(rows, SAMPLING, task_id)
    results = {row_id: admission.refuse(row_id, error) for row_id, error in errors}
    jobs = admission.submit(asks)
    try:
        for job in jobs:
            results[job.row_id] = await asyncio.shield(job.done)
    finally:
        for job in jobs:
            admission.leave(job)
    return [results[row.id] for row in rows]


async def test_rows_in_engine_stay_within_the_row_budget() -> None:
    settings = make_settings(max_num_seqs=3)
    engine = HeldEngine(settings)
    async with admitting(engine, settings) as admission:
        running = asyncio.create_task(run_rows(admission, [f"row {n}" for n in range(40)]))
        await until(lambda: engine.held == 6)
        await asyncio.sleep(0.02)
        assert engine.most_held == admission.batch.max_rows == 6
        engine.release.set()
        results = await running
    assert [result.id for result in results] == [str(n) for n in range(40)]
    assert all(result.error_kind is None for result in results)


async def test_tokens_in_engine_stay_within_the_token_budget() -> None:
    settings = make_settings(max_num_seqs=100, simulated={"kv_cache_tokens": 100})
    engine = HeldEngine(settings)
    async with admitting(engine, settings) as admission:
        running = asyncio.create_task(run_rows(admission, ["1234567"] * 20))
        await until(lambda: engine.held == 5)
        await asyncio.sleep(0.02)
        assert admission.tokens == 5 * (2 + 32)
        assert admission.tokens <= admission.max_tokens == 200
        engine.release.set()
        await running


async def test_a_row_larger_than_the_budget_runs_alone() -> None:
    settings = make_settings(simulated={"kv_cache_tokens": 4})
    engine = HeldEngine(settings)
    async with admitting(engine, settings) as admission:
        running = asyncio.create_task(run_rows(admission, ["first", "second"]))
        engine.release.set()
        results = await running
    assert engine.most_held == 1
    assert [result.error_kind for result in results] == [None, None]


async def test_rows_of_different_requests_run_together() -> None:
    settings = make_settings(max_num_seqs=8)
    engine = HeldEngine(settings)
    async with admitting(engine, settings) as admission:
        requests = [asyncio.create_task(run_rows(admission, ["a", "b", "c"])) for _ in range(2)]
        await until(lambda: engine.held == 6)
        engine.release.set()
        await asyncio.gather(*requests)


FAULTS = [
    pytest.param(PromptError("too_long", "9 tokens too many"), "too_long", id="permanent"),
    pytest.param(EngineError("a step failed"), "engine_error", id="engine error"),
    pytest.param(EngineTimeout("no token came"), "timeout", id="timeout"),
    pytest.param(EngineOverloaded("its queue is full"), "overloaded", id="overloaded"),
    pytest.param(RuntimeError("a bug"), "engine_error", id="unexpected"),
    pytest.param(asyncio.CancelledError(), "cancelled", id="cancelled inside the engine"),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
async def test_a_poisoned_row_hurts_only_itself(fault: BaseException, kind: str) -> None:
    settings = make_settings()
    async with admitting(FaultyEngine(settings, fault), settings) as admission:
        results = await run_rows(admission, ["good", "poison", "good", "good"])
        admission.check_alive()
    assert [result.error_kind for result in results] == [None, kind, None, None]
    assert results[1].error


async def test_a_fault_in_rendering_hurts_only_its_row() -> None:
    settings = make_settings()
    engine = FaultyEngine(settings, ValueError("bad template"), in_render=True)
    async with admitting(engine, settings) as admission:
        results = await run_rows(admission, ["good", "poison"])
    assert [result.error_kind for result in results] == [None, "engine_error"]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        pytest.param(None, "invalid_prompt", id="null"),
        pytest.param(17, "invalid_prompt", id="number"),
        pytest.param("", "empty", id="empty"),
        pytest.param(" \n\t", "empty", id="blank"),
        pytest.param("x" * 1_000_000, "too_long", id="one megabyte"),
    ],
)
async def test_a_bad_prompt_is_a_failed_row_with_a_reason(prompt: object, kind: str) -> None:
    settings = make_settings()
    async with admitting(SimulatedEngine(settings), settings) as admission:
        bad, good = await run_rows(admission, [prompt, "good"])
    assert (bad.error_kind, good.error_kind) == (kind, None)
    assert bad.error
    assert len(bad.error) < 300


async def test_sampling_of_a_row_overrides_that_of_the_request() -> None:
    settings = make_settings()
    async with admitting(SimulatedEngine(settings), settings) as admission:
        rows = [make_row(sampling={"max_tokens": 1}), make_row("1", sampling={"top_p": 7})]
        result, failed = await answer(admission, rows)
    assert (result.completion_tokens, result.finish_reason) == (1, "length")
    assert failed.error_kind == "invalid_sampling"
    assert "top_p" in (failed.error or "")


async def test_cancelled_callers_leave_queue_and_engine_empty() -> None:
    settings = make_settings(max_num_seqs=2)
    engine = HeldEngine(settings)
    async with admitting(engine, settings) as admission:
        running = asyncio.create_task(run_rows(admission, [f"row {n}" for n in range(30)]))
        await until(lambda: engine.held == 4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: admission.rows == 0)
        assert (admission.queued, admission.tokens, engine.aborted) == (0, 0, 4)
        assert admission.aborted == 30
        engine.release.set()
        results = await run_rows(admission, ["still served"])
    assert results[0].error_kind is None


async def test_a_full_queue_refuses_before_taking_anything() -> None:
    settings = make_settings(max_queue_size=5)
    async with admitting(SimulatedEngine(settings), settings) as admission:
        with pytest.raises(EngineOverloaded, match="queue of 5"):
            admission.submit([make_ask(number) for number in range(6)])
        assert (admission.queued, admission.rejected, admission.joined) == (0, 6, 0)


async def test_leaving_waits_for_rows_and_refuses_new_ones() -> None:
    settings = make_settings()
    engine = HeldEngine(settings)
    admission = await Admission(engine, settings).__aenter__()
    running = asyncio.create_task(run_rows(admission, ["a", "b"]))
    await until(lambda: engine.held == 2)
    leaving = asyncio.create_task(admission.__aexit__())
    await asyncio.sleep(0.02)
    assert not leaving.done()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        admission.check_open()
    engine.release.set()
    await leaving
    assert [result.error_kind for result in await running] == [None, None]
    await engine.close()


async def test_a_dead_engine_fails_every_row_and_is_reported_once() -> None:
    settings = make_settings(simulated={"die_after": 3})
    engine = SimulatedEngine(settings)
    deaths: list[str] = []
    async with Admission(engine, settings, lambda: deaths.append("dead")) as admission:
        results = await run_rows(admission, [f"row {n}" for n in range(12)])
        with pytest.raises(EngineUnavailable):
            admission.check_open()
    assert len([result for result in results if result.error_kind == "engine_error"]) >= 9
    assert deaths == ["dead"]


@pytest.mark.parametrize("loop", ["_consumer_task", "_aggregator_task"])
async def test_a_dead_batcher_loop_leaves_nobody_waiting(loop: str) -> None:
    settings = make_settings(max_num_seqs=1)
    engine = HeldEngine(settings)
    deaths: list[str] = []
    async with Admission(engine, settings, lambda: deaths.append("dead")) as admission:
        running = asyncio.create_task(run_rows(admission, [f"row {n}" for n in range(6)]))
        await until(lambda: engine.held == 2)
        getattr(admission.batch._batcher, loop).cancel()
        await until(lambda: not admission.batch.is_alive)
        engine.release.set()
        results = await running
        with pytest.raises(EngineUnavailable, match="dead"):
            admission.check_open()
    assert [result.error_kind for result in results] == [None] * 2 + ["engine_error"] * 4
    assert deaths == ["dead"]
    await engine.close()


async def test_stats_count_what_happened() -> None:
    settings = make_settings()
    async with admitting(SimulatedEngine(settings), settings) as admission:
        results = await run_rows(admission, ["a", "", "b"])
        stats = admission.stats()
    assert (stats["completed"], stats["failed"]) == (2, {"empty": 1})
    assert stats["completion_tokens"] == sum(result.completion_tokens for result in results)
    assert stats["total_submitted"] == stats["total_completed"] == 2
    assert stats["queued"] == stats["in_flight"] == 0
