"""The fan-out is bounded and lazy, and leaves nothing running however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.fan_out import fan_out


async def count_to(number: int) -> AsyncIterator[int]:
    for item in range(number):
        yield item


async def steps(number: int = 10) -> None:
    """Lets everything that can go on do so."""
    for _ in range(number):
        await asyncio.sleep(0)


def others() -> set[asyncio.Task[object]]:
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not current}


class Runs:
    """Runs that end when told to."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.most = 0
        self._ends: dict[int, asyncio.Future[str]] = {}

    async def run(self, item: int) -> str:
        self.started.append(item)
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends[item] = end
        self.most = max(self.most, len(self._ends))
        try:
            return await end
        except asyncio.CancelledError:
            await steps()
            self.cancelled.append(item)
            raise
        finally:
            del self._ends[item]

    def finish(self, item: int) -> None:
        self._ends[item].set_result(f"answer {item}")

    def fail(self, item: int, error: Exception) -> None:
        self._ends[item].set_exception(error)

    def cancel(self, item: int) -> None:
        self._ends[item].cancel()


async def collect(
    items: AsyncIterator[int], run: Callable[[int], Awaitable[str]], limit: int
) -> list[tuple[int, str]]:
    return [pair async for pair in fan_out(items, run, limit)]


async def test_limit_is_reached_and_kept() -> None:
    runs = Runs()
    collecting = asyncio.create_task(collect(count_to(9), runs.run, 3))
    for done in range(9):
        await steps(30)
        assert len(runs.started) == min(9, done + 3)
        runs.finish(done)
    assert len(await collecting) == 9
    assert runs.most == 3


async def test_results_come_as_they_finish() -> None:
    runs = Runs()
    collecting = asyncio.create_task(collect(count_to(3), runs.run, 3))
    for item in (2, 0, 1):
        await steps(30)
        runs.finish(item)
    assert await collecting == [(2, "answer 2"), (0, "answer 0"), (1, "answer 1")]


async def test_source_is_one_item_ahead() -> None:
    pulled: list[int] = []

    async def source() -> AsyncIterator[int]:
        async for item in count_to(100):
            pulled.append(item)
            yield item

    runs = Runs()
    collecting = asyncio.create_task(collect(source(), runs.run, 4))
    await steps(50)
    assert len(runs.started) == 4
    assert len(pulled) == 5
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting


async def test_slow_source_holds_up_no_result() -> None:
    async def source() -> AsyncIterator[int]:
        yield 0
        await asyncio.get_running_loop().create_future()

    runs = Runs()
    async with aclosing(fan_out(source(), runs.run, 2)) as pairs:
        first = asyncio.ensure_future(anext(pairs))
        await steps()
        runs.finish(0)
        assert await first == (0, "answer 0")


async def test_failed_run_ends_the_others() -> None:
    runs = Runs()
    collecting = asyncio.create_task(collect(count_to(9), runs.run, 3))
    await steps(30)
    runs.fail(1, ValueError("run 1"))
    with pytest.raises(ValueError, match="run 1"):
        await collecting
    assert sorted(runs.cancelled) == [0, 2]
    assert not others()


async def test_failed_source_ends_the_runs() -> None:
    async def source() -> AsyncIterator[int]:
        yield 0
        yield 1
        raise ValueError("source")

    runs = Runs()
    with pytest.raises(ValueError, match="source"):
        await collect(source(), runs.run, 5)
    assert sorted(runs.cancelled) == [0, 1]
    assert not others()


async def test_early_stop_leaves_no_task() -> None:
    runs = Runs()
    async with aclosing(fan_out(count_to(100), runs.run, 3)) as pairs:
        first = asyncio.ensure_future(anext(pairs))
        await steps()
        runs.finish(1)
        assert await first == (1, "answer 1")
    assert sorted(runs.cancelled) == [0, 2]
    assert not others()


async def test_cancelled_consumer_leaves_no_task() -> None:
    runs = Runs()
    collecting = asyncio.create_task(collect(count_to(100), runs.run, 3))
    await steps(30)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert sorted(runs.cancelled) == [0, 1, 2]
    assert not others()


async def test_run_cancelled_by_itself_surfaces() -> None:
    runs = Runs()
    collecting = asyncio.create_task(collect(count_to(100), runs.run, 2))
    await steps(30)
    runs.cancel(0)
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert sorted(runs.cancelled) == [0, 1]
    assert not others()


async def test_empty_source_yields_nothing() -> None:
    runs = Runs()
    assert await collect(count_to(0), runs.run, 3) == []
    assert runs.started == []


@given(num_items=st.integers(0, 40), limit=st.integers(1, 50), delays=st.lists(st.integers(0, 4), min_size=1))
@settings(max_examples=60, deadline=None)
def test_each_item_comes_back_once(num_items: int, limit: int, delays: list[int]) -> None:
    running = 0

    async def run(item: int) -> str:
        nonlocal running
        running += 1
        assert running <= limit
        await steps(delays[item % len(delays)])
        running -= 1
        return f"answer {item}"

    pairs = asyncio.run(collect(count_to(num_items), run, limit))
    assert sorted(pairs) == [(item, f"answer {item}") for item in range(num_items)]
