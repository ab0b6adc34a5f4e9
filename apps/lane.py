"""One queue of jobs in front of the engine: a TokenBatcher, and the budget that its rows may fill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from flyte.extras import BatchStats, TokenBatcher

from apps.jobs import Job
from apps.settings import AppSettings


class Lane:
    """`let_in(lane, jobs)` is called with each batch and lets every job in, or waits until it can."""

    def __init__(
        self,
        let_in: Callable[[Lane, list[Job]], Awaitable[list[None]]],
        settings: AppSettings,
        max_rows: int,
        max_tokens: int,
        priority: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.priority = priority
        """Inside the engine; the lowest goes first."""
        self.max_queue_size = settings.max_queue_size
        self.queue: set[Job] = set()
        """Jobs that are rendered or wait for the engine."""
        self.running: set[Job] = set()
        """Jobs in the engine."""
        self.tokens = 0
        """Tokens that the rows in the engine may come to hold."""
        self._batcher = TokenBatcher[Job, None](
            inference_fn=partial(let_in, self),
            target_batch_tokens=settings.target_batch_tokens,
            max_batch_size=settings.max_batch_size,
            batch_timeout_s=settings.batch_timeout_s,
            max_queue_size=settings.max_queue_size,
        )

    async def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """`on_end` is called when a loop of the batcher ends, for whatever reason."""
        await self._batcher.start()
        for loop in self._loops():
            loop.add_done_callback(on_end)

    async def stop(self) -> None:
        """A dead loop would keep the batcher from stopping: the other is ended by force."""
        if self.is_alive:
            await self._batcher.stop()
        for loop in self._loops():
            loop.cancel()

    @property
    def rows(self) -> int:
        return len(self.running)

    @property
    def stats(self) -> BatchStats:
        return self._batcher.stats

    @property
    def is_alive(self) -> bool:
        return all(not loop.done() for loop in self._loops())

    def has_room(self, job: Job) -> bool:
        return self.rows < self.max_rows and self.tokens + job.cost <= self.max_tokens

    async def submit(self, job: Job) -> None:
        await self._batcher.submit(job, estimated_tokens=job.cost)

    def let_in(self, job: Job) -> None:
        self.queue.discard(job)
        self.running.add(job)
        self.tokens += job.cost
        job.admitted.set_result(None)

    def remove(self, job: Job) -> None:
        """From the engine, if it was there."""
        if job in self.running:
            self.running.remove(job)
            self.tokens -= job.cost

    def _loops(self) -> list[asyncio.Task[None]]:
        tasks = (self._batcher._aggregator_task, self._batcher._consumer_task)
        return [task for task in tasks if task is not None]
