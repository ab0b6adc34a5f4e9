"""The simulated engine keeps what it promises: determinism, limits, roofline order, failures."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from apps.engines.base import Completion, RenderedPrompt
from apps.engines.simulated import SimulatedEngine
from apps.errors import EngineError, EngineUnavailable, PromptError
from apps.schema import Row, SamplingParams
from tests.engines import make_settings, until


@asynccontextmanager
async def engine_of(**overrides: object) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(make_settings(**overrides))
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: SimulatedEngine, prompt: str, **sampling: object) -> Completion:
    rendered = await engine.render(Row(id="0", prompt=prompt))
    return await engine.generate(rendered, SamplingParams.model_validate(sampling))


async def test_completions_depend_on_seed_and_prompt_alone() -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    async with engine_of() as engine, engine_of(max_num_seqs=1) as narrow:
        together = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
        alone = [await ask(narrow, prompt) for prompt in prompts]
    async with engine_of(simulated={"seed": 1}) as other:
        reseeded = await asyncio.gather(*(ask(other, prompt) for prompt in prompts))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.text for answer in together] != [answer.text for answer in reseeded]


async def test_lengths_have_the_configured_mean() -> None:
    async with engine_of(max_num_seqs=1000, max_model_len=100_000) as engine:
        answers = await asyncio.gather(*(ask(engine, f"{n}", max_tokens=90_000) for n in range(1000)))
    lengths = [answer.completion_tokens for answer in answers]
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.1)
    assert statistics.pstdev(math.log(length) for length in lengths) == pytest.approx(0.5, rel=0.1)


async def test_max_tokens_truncates_and_says_so() -> None:
    async with engine_of() as engine:
        cut = await ask(engine, "a", max_tokens=3)
        whole = await ask(engine, "a", max_tokens=2000)
    assert (cut.completion_tokens, cut.finish_reason) == (3, "length")
    assert whole.finish_reason == "stop"


async def test_a_prompt_beyond_the_context_is_too_long() -> None:
    async with engine_of(max_model_len=10) as engine:
        with pytest.raises(PromptError, match="fewer than 10") as caught:
            await engine.render(Row(id="0", prompt="x" * 40))
        fits = await engine.render(Row(id="0", prompt="x" * 32))
    assert caught.value.kind == "too_long"
    assert fits.num_tokens == 9


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        pytest.param({"max_num_seqs": 3}, 3, id="rows"),
        pytest.param({"max_num_seqs": 50, "simulated": {"kv_cache_tokens": 25}}, 2, id="KV cache"),
    ],
)
async def test_no_more_run_than_fit(limits: dict[str, object], most: int) -> None:
    async with engine_of(**limits) as engine:
        seen = 0

        async def watch() -> None:
            nonlocal seen
            while True:
                seen = max(seen, len(engine._running))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        prompt = RenderedPrompt(num_tokens=2, payload="p")
        sampling = SamplingParams(max_tokens=10)
        await asyncio.gather(*(engine.generate(prompt, sampling) for _ in range(20)))
        watching.cancel()
    assert seen == most


async def test_an_arrival_joins_a_running_batch() -> None:
    slow = {"time_scale": 1.0, "step_overhead_s": 0.01, "mean_completion_tokens": 100_000.0}
    async with engine_of(simulated=slow) as engine:
        long = asyncio.create_task(ask(engine, "long", max_tokens=4000))
        await until(lambda: len(engine._running) == 1)
        short = await ask(engine, "short", max_tokens=2)
        assert not long.done()
        long.cancel()
    assert short.completion_tokens == 2


async def test_a_lower_priority_goes_first() -> None:
    async with engine_of(max_num_seqs=1, simulated={"time_scale": 0.01}) as engine:
        finished: list[int] = []

        async def generate(priority: int) -> None:
            await engine.generate(RenderedPrompt(2, f"{priority}"), SamplingParams(), priority=priority)
            finished.append(priority)

        running = asyncio.create_task(generate(9))
        await until(lambda: len(engine._running) == 1)
        await asyncio.gather(*(generate(priority) for priority in (5, 3, -1, 4)), running)
    assert finished == [9, -1, 3, 4, 5]


async def test_equal_priorities_keep_their_order() -> None:
    async with engine_of(max_num_seqs=1) as engine:
        finished: list[int] = []

        async def generate(number: int) -> None:
            await engine.generate(RenderedPrompt(2, f"{number}"), SamplingParams())
            finished.append(number)

        await asyncio.gather(*(generate(number) for number in range(30)))
    assert finished == list(range(30))


async def test_pieces_come_early_and_make_the_text() -> None:
    slow = {"time_scale": 1.0, "step_overhead_s": 0.01, "mean_completion_tokens": 100_000.0}
    async with engine_of(simulated=slow) as engine:
        pieces: list[str] = []
        answer = asyncio.create_task(
            engine.generate(RenderedPrompt(2, "p"), SamplingParams(max_tokens=20), on_text=pieces.append)
        )
        await until(lambda: pieces)
        early = answer.done()
        completion = await answer
    assert not early
    assert len(pieces) == 2
    assert "".join(pieces) == completion.text


async def test_lengths_obey_the_sampling_parameters() -> None:
    async with engine_of(simulated={"mean_completion_tokens": 5.0}) as engine:
        at_least = await ask(engine, "a", min_tokens=300)
        to_the_end = await ask(engine, "a", ignore_eos=True, max_tokens=400)
    assert (at_least.completion_tokens, at_least.finish_reason) == (300, "stop")
    assert (to_the_end.completion_tokens, to_the_end.finish_reason) == (400, "length")


async def test_token_ids_count_one_each() -> None:
    async with engine_of() as engine:
        rendered = await engine.render(Row(id="0", prompt=[5, 6, 7]))
    assert rendered.num_tokens == 3


async def test_a_step_follows_the_roofline() -> None:
    async with engine_of(simulated={"memory_gb_per_s": 100, "weights_gb": 10}) as engine:
        memory_bound = engine._step_s(prefill_tokens=0)
        compute_bound = engine._step_s(prefill_tokens=10_000)
    assert memory_bound == pytest.approx(0.003 + 10 / 100)
    assert compute_bound == pytest.approx(0.003 + 10_000 * 15.2e9 / 54e12)


async def test_cancelled_prompts_make_room() -> None:
    slow = {"time_scale": 1.0, "mean_completion_tokens": 100_000.0}
    async with engine_of(max_num_seqs=1, simulated=slow) as engine:
        first = asyncio.create_task(ask(engine, "first", max_tokens=4000))
        await until(lambda: len(engine._running) == 1)
        first.cancel()
        second = await ask(engine, "second", max_tokens=1)
    assert second.completion_tokens == 1


async def test_injected_failures_follow_the_seed() -> None:
    async def failures() -> list[int]:
        async with engine_of(simulated={"failure_rate": 0.5}) as engine:
            answers = [ask(engine, f"{number}") for number in range(40)]
            outcomes = await asyncio.gather(*answers, return_exceptions=True)
            return [n for n, outcome in enumerate(outcomes) if isinstance(outcome, EngineError)]

    first, second = await failures(), await failures()
    assert first == second
    assert 5 < len(first) < 35


async def test_death_fails_what_runs_and_all_that_follows() -> None:
    slow = {"time_scale": 1.0, "mean_completion_tokens": 100_000.0, "die_after": 2}
    async with engine_of(simulated=slow) as engine:
        outcomes = await asyncio.gather(
            *(ask(engine, f"{number}") for number in range(5)), return_exceptions=True
        )
        with pytest.raises(EngineUnavailable):
            await engine.check_health()
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
