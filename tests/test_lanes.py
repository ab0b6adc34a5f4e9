"""Interactive rows beside batch rows, and what the batchers' promises rest on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from flyte.extras import TokenBatcher

from apps import admission as admission_module
from apps.admission import Admission
from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineOverloaded, EngineUnavailable
from apps.jobs import Ask, parse_asks
from apps.schema import SamplingParams
from tests.engines import HeldEngine, make_row, make_settings, until


def make_asks(num_rows: int, prefix: str = "batch", task_id: str = "") -> list[Ask]:
    sampling = SamplingParams(max_tokens=32)
    rows = (make_row(str(n), f"{prefix} {n}?") for n in range(num_rows))
    return parse_asks(rows, sampling, task_id)[0]


async def test_an_interactive_row_enters_at_once_while_5000_rows_wait() -> None:
    settings = make_settings(max_num_seqs=16)
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        admission.submit(make_asks(5000))
        await until(lambda: engine.held == 28)
        assert admission.queued == 4972
        (chat,) = admission.submit(make_asks(1, "chat"), interactive=True)
        await until(lambda: engine.held == 29)
        assert chat in admission.interactive.running
        assert admission.batch.rows == 28
        admission.cancel_all()
    await engine.close()


async def test_an_interactive_row_runs_next_while_5000_rows_wait() -> None:
    """On the simulated replica, whose own queue is full of batch rows, too."""
    simulated = {
        "time_scale": 1.0,
        "step_overhead_s": 0.0,
        "weights_gb": 0.05,
        "mean_completion_tokens": 20.0,
    }
    settings = make_settings(max_num_seqs=8, simulated=simulated)
    engine = SimulatedEngine(settings)
    async with Admission(engine, settings) as admission:
        admission.submit(make_asks(5000))
        await until(lambda: admission.completed >= 8)
        before = admission.completed
        (chat,) = admission.submit(make_asks(1, "chat"), interactive=True)
        result = await chat.done
        assert result.error_kind is None
        assert admission.completed - before < 100
        admission.cancel_all()
    await engine.close()


async def test_batch_rows_leave_the_reserved_share_alone() -> None:
    settings = make_settings(max_num_seqs=8)
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        admission.submit(make_asks(50))
        admission.submit(make_asks(50, "chat"), interactive=True)
        await until(lambda: engine.held == 16)
        await asyncio.sleep(0.02)
        assert (admission.batch.rows, admission.interactive.rows) == (14, 2)
        assert engine.most_held == admission.max_rows
        admission.cancel_all()
    await engine.close()


async def test_a_full_queue_of_one_lane_is_not_that_of_the_other() -> None:
    settings = make_settings(max_num_seqs=1, max_queue_size=4)
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        admission.submit(make_asks(4))
        with pytest.raises(EngineOverloaded):
            admission.submit(make_asks(5, "more"))
        assert len(admission.submit(make_asks(4, "chat"), interactive=True)) == 4
        admission.cancel_all()
    await engine.close()


async def test_rows_that_join_need_no_room_in_the_queue() -> None:
    settings = make_settings(max_num_seqs=1, max_queue_size=4)
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        first = admission.submit(make_asks(4, task_id="chunk"))
        assert admission.submit(make_asks(4, task_id="chunk")) == first
        assert (admission.joined, admission.rejected) == (4, 0)
        admission.cancel_all()
    await engine.close()


async def test_a_caller_that_comes_back_in_time_finds_its_row_running() -> None:
    settings = make_settings()
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        (job,) = admission.submit(make_asks(1, task_id="chunk"))
        await until(lambda: engine.held == 1)
        admission.leave(job)
        await asyncio.sleep(0.05)
        assert admission.submit(make_asks(1, task_id="chunk")) == [job]
        await asyncio.sleep(admission_module.GRACE_S)
        engine.release.set()
        assert (await job.done).error_kind is None
        assert (engine.aborted, admission.aborted) == (0, 0)
    await engine.close()


async def test_a_row_that_nobody_comes_back_for_is_aborted_within_a_second() -> None:
    settings = make_settings()
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        (job,) = admission.submit(make_asks(1, task_id="chunk"))
        await until(lambda: engine.held == 1)
        admission.leave(job)
        async with asyncio.timeout(1.0):
            await until(lambda: engine.aborted == 1)
        assert (admission.aborted, admission.rows) == (1, 0)
    await engine.close()


async def test_rows_handed_in_while_draining_are_refused() -> None:
    """The batcher itself would take them and never answer."""
    settings = make_settings(max_num_seqs=1)
    engine = HeldEngine(settings)
    async with Admission(engine, settings) as admission:
        jobs = admission.submit(make_asks(5))
        await until(lambda: engine.held == 2)
        admission.drain()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            admission.submit(make_asks(1, "late"))
        with pytest.raises(EngineUnavailable, match="shutting down"):
            admission.submit(make_asks(1, "late"), interactive=True)
        engine.release.set()
        kinds = [(await job.done).error_kind for job in jobs]
    assert kinds == [None] * 2 + ["cancelled"] * 3
    await engine.close()


async def test_a_lone_row_does_not_wait_for_company() -> None:
    """With a `min_batch_size` of two the batcher would put it back into its queue for ever."""
    settings = make_settings(max_batch_size=64, batch_timeout_s=0.01)
    engine = SimulatedEngine(settings)
    async with Admission(engine, settings) as admission:
        (job,) = admission.submit(make_asks(1))
        async with asyncio.timeout(5):
            assert (await job.done).error_kind is None
        assert admission.stats()["total_batches"] == 1
    await engine.close()


async def test_the_cost_of_a_row_is_its_prompt_and_what_it_may_generate() -> None:
    settings = make_settings(max_model_len=100)
    engine = SimulatedEngine(settings)
    async with Admission(engine, settings) as admission:
        rows = [
            make_row("0", "x" * 39, sampling={"max_tokens": 20}),
            make_row("1", "x" * 39, sampling={"max_tokens": 1000}),
        ]
        for job in admission.submit(parse_asks(rows, SamplingParams())[0]):
            await job.done
        assert admission.stats()["total_batch_cost"] == (10 + 20) + (10 + 90)
    await engine.close()


@dataclass
class Estimating:
    """A record of the TokenBatcher's `TokenEstimator` protocol."""

    text: str

    def estimate_tokens(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("record", "estimator", "explicit", "cost"),
    [
        pytest.param(Estimating("a"), True, 11, 11, id="explicit first"),
        pytest.param(Estimating("a"), True, None, 7, id="then the estimator function"),
        pytest.param(Estimating("a"), False, None, 3, id="then the record's protocol"),
        pytest.param("a", False, None, 5, id="then the default"),
    ],
)
async def test_the_batcher_takes_costs_in_the_documented_order(
    record: object, estimator: bool, explicit: int | None, cost: int
) -> None:
    async def infer(records: list[object]) -> list[None]:
        return [None] * len(records)

    batcher = TokenBatcher[object, None](
        inference_fn=infer,
        token_estimator=(lambda _: 7) if estimator else None,
        default_token_estimate=5,
    )
    async with batcher:
        await (await batcher.submit(record, estimated_tokens=explicit))
    assert batcher.stats.total_batch_cost == cost
