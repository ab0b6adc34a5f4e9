"""Whatever callers and engine do at random, every row is answered once and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from apps.admission import Admission
from apps.engines.base import Completion, RenderedPrompt
from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineError, PromptError
from apps.jobs import parse_asks
from apps.schema import Row, SamplingParams
from apps.settings import AppSettings
from tests.engines import make_row, make_settings

NUM_REQUESTS = 120


class Capricious(SimulatedEngine):
    """Renders and generates after a random pause, or fails, or cancels itself."""

    def __init__(self, settings: AppSettings, chance: random.Random) -> None:
        super().__init__(settings)
        self._chance = chance

    async def render(self, row: Row) -> RenderedPrompt:
        await self._hesitate()
        return await super().render(row)

    async def generate(self, prompt: RenderedPrompt, sampling: SamplingParams, **options: Any) -> Completion:
        await self._hesitate()
        return await super().generate(prompt, sampling, **options)

    async def _hesitate(self) -> None:
        await asyncio.sleep(self._chance.choice([0, 0, 0.001, 0.004]))
        faults = [PromptError("too_long", "so it is"), EngineError("so it is"), RuntimeError("a bug")]
        fault = self._chance.choice([*faults, asyncio.CancelledError(), *[None] * 26])
        if fault is not None:
            raise fault


async def ask(admission: Admission, chance: random.Random, number: int) -> None:
    """One request of a few rows, some of them another's too, whose caller may leave half-way."""
    task_id = f"task {number // 3}"
    rows = [make_row(str(n), f"{task_id} row {n}") for n in range(chance.randint(1, 8))]
    jobs = admission.submit(parse_asks(rows, SamplingParams(), task_id)[0])
    try:
        patience_s = chance.choice([0, 0.002, 0.01, 30, 30, 30])
        _, pending = await asyncio.wait([job.done for job in jobs], timeout=patience_s)
        assert not pending or patience_s < 30
        for row, job in zip(rows, jobs, strict=True):
            if job.done.done():
                result = job.done.result()
                assert result.id == row.id
                assert (result.text is None) == (result.error_kind is not None)
    finally:
        for job in jobs:
            admission.leave(job, at_once=chance.random() < 0.5)


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_lost_or_left_behind(seed: int) -> None:
    chance = random.Random(seed)
    settings = make_settings(max_num_seqs=3, max_queue_size=2000, max_batch_size=4)
    engine = Capricious(settings, chance)
    async with Admission(engine, settings) as admission:
        await asyncio.gather(*(ask(admission, chance, number) for number in range(NUM_REQUESTS)))
        await admission.wait_idle()
        stats = admission.stats()
        admission.check_alive()
        assert (stats["queued"], stats["in_flight"], stats["in_flight_tokens"]) == (0, 0, 0)
        assert not admission._running
    assert min(stats["completed"], sum(stats["failed"].values()), stats["aborted"], stats["joined"]) > 0
    await engine.close()


async def test_the_same_seed_answers_a_row_alike_however_it_is_asked() -> None:
    settings = make_settings()
    engine = SimulatedEngine(settings)
    async with Admission(engine, settings) as admission:
        texts = set()
        for task_id in ("", "a", "b", "a"):
            (job,) = admission.submit(parse_asks([make_row()], SamplingParams(), task_id)[0])
            texts.add((await job.done).text)
        assert len(texts) == 1
        assert (admission.completed, admission.joined) == (3, 1)
    await engine.close()
