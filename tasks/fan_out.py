"""Bounded, as-completed fan-out, the same under `--local` and on a cluster.

`flyte.map` runs sequentially under `--local`, keeps head-of-line order, and can wait for ever for a
child that was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def fan_out(
    items: AsyncIterator[T], run: Callable[[T], Awaitable[R]], limit: int
) -> AsyncGenerator[tuple[T, R], None]:
    """Yields `(item, await run(item))` as each finishes, at most `limit` at a time.

    One item is pulled ahead of the room for it, and no more, so memory is O(limit). What `run` or `items`
    raises ends the fan-out: the runs still going are cancelled and awaited first. A run that ends
    cancelled by itself raises `CancelledError`, too, instead of being waited for. Close the generator
    (`contextlib.aclosing`) where it may be left before its end.
    """
    running: dict[asyncio.Future[R], T] = {}
    pull: asyncio.Future[T] | None = asyncio.ensure_future(anext(items))
    try:
        while running or pull is not None:
            waits_for: set[asyncio.Future[R] | asyncio.Future[T]] = set(running)
            if pull is not None and len(running) < limit:
                waits_for.add(pull)
            await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
            if pull is not None and pull.done() and len(running) < limit:
                try:
                    item = pull.result()
                except StopAsyncIteration:
                    pull = None
                else:
                    running[asyncio.ensure_future(run(item))] = item
                    pull = asyncio.ensure_future(anext(items))
            for run_of_item in [future for future in running if future.done()]:
                yield running.pop(run_of_item), run_of_item.result()
    finally:
        left = [future for future in (*running, pull) if future is not None]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
