"""Admission: a TokenBatcher decides when a row enters the engine, never what runs together.

`TokenBatcher.inference_fn` waits until the engine has room for a row, in rows and in tokens, lets it
in, and goes on; the engine batches continuously by itself. Rows of batch jobs share one batcher and may
fill the engine but for a reserved share. Interactive rows have a batcher of their own, so that none of
them queues behind a batch job, and a better priority inside the engine.

What keeps a batcher from hanging: nothing leaves its `inference_fn`, `min_batch_size` is 1, and no row
is taken once draining has begun, which ends before the batchers are stopped.

A row that is sent again under the same task id joins the job that runs for it or lately ran, so that a
retry after a broken connection computes nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Self

from apps.engines.base import Engine
from apps.errors import (
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    ErrorKind,
    PromptError,
)
from apps.jobs import Ask, Job
from apps.lane import Lane
from apps.metrics import Latencies, UseClock
from apps.recent import Recent
from apps.schema import RowResult
from apps.settings import ROWS_IN_FLIGHT_PER_SEQ, AppSettings

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""How long a row that may be joined runs on when nobody waits for it: its caller may be reconnecting."""
HEALTH_INTERVAL_S = 1.0
"""An engine that dies with nothing in it is noticed this late."""

KIND_OF_ENGINE_ERROR: dict[type[EngineError], ErrorKind] = {
    EngineTimeout: "timeout",
    EngineOverloaded: "overloaded",
    EngineUnavailable: "engine_error",
    EngineError: "engine_error",
}


class Admission:
    """Between the request handlers and one engine; an async context manager.

    `on_dead` is called once, when the engine or a loop of a batcher is found dead.
    """

    def __init__(
        self, engine: Engine, settings: AppSettings, on_dead: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._on_dead = on_dead
        self.max_rows = ROWS_IN_FLIGHT_PER_SEQ * engine.limits.max_num_seqs
        self.max_tokens = ROWS_IN_FLIGHT_PER_SEQ * engine.limits.kv_cache_tokens
        share = 1 - settings.interactive_share
        self.batch = Lane(
            self._let_in, settings, math.ceil(share * self.max_rows), math.ceil(share * self.max_tokens)
        )
        self.interactive = Lane(self._let_in, settings, self.max_rows, self.max_tokens, priority=-1)
        self._lanes = (self.batch, self.interactive)
        self.admitted = 0
        self.completed = 0
        self.failed: Counter[ErrorKind] = Counter()
        self.aborted = 0
        self.rejected = 0
        self.joined = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._running: dict[bytes, Job] = {}
        """Unfinished jobs that may be joined."""
        self._recent = Recent()
        self._change = asyncio.Event()
        """Set whenever a row has left the queue or the engine."""
        self._use = UseClock()
        self.latencies = Latencies()
        self._draining = False
        self._dead = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for lane in self._lanes:
            await lane.start(on_end=self._note_loop_end)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Lets what is in the engine finish."""
        assert self._watching is not None
        self.drain()
        await self.wait_idle()
        self._watching.cancel()
        for lane in self._lanes:
            await lane.stop()

    @property
    def queued(self) -> int:
        """Rows that wait for the engine or are rendered."""
        return len(self.batch.queue) + len(self.interactive.queue)

    @property
    def rows(self) -> int:
        """Rows in the engine."""
        return len(self.batch.running) + len(self.interactive.running)

    @property
    def tokens(self) -> int:
        """Tokens that the rows in the engine may come to hold."""
        return self.batch.tokens + self.interactive.tokens

    def check_alive(self) -> None:
        """Raises `EngineUnavailable` if the engine or a loop of a batcher has died."""
        if self._dead or not all(lane.is_alive for lane in self._lanes):
            raise EngineUnavailable("the engine is dead", retry_after_s=30.0)

    def check_open(self) -> None:
        """Raises `EngineUnavailable` if no row is taken: dead, or shutting down."""
        self.check_alive()
        if self._draining:
            raise EngineUnavailable("the app is shutting down", retry_after_s=5.0)

    def submit(self, asks: Sequence[Ask], *, interactive: bool = False) -> list[Job]:
        """A job for each, all or none, without awaiting.

        The caller says `leave` to every job that it does not see finished; a job that nobody waits for
        is aborted. Raises `EngineOverloaded` if the new ones among them exceed the queue, and
        `EngineUnavailable` as `check_open`.
        """
        self.check_open()
        lane = self.interactive if interactive else self.batch
        jobs = [self._find(ask) for ask in asks]
        num_new = jobs.count(None)
        if len(lane.queue) + num_new > lane.max_queue_size:
            self.rejected += num_new
            raise EngineOverloaded(
                f"{len(lane.queue)} rows wait, {num_new} more exceed the queue of {lane.max_queue_size}"
            )
        self.joined += len(jobs) - num_new
        return [self._enlist(job or self._begin(ask, lane)) for ask, job in zip(asks, jobs, strict=True)]

    def refuse(self, row_id: str, error: PromptError) -> RowResult:
        """The answer to a row that is not valid, counted."""
        return self._count(RowResult.failed(row_id, error.kind, str(error)))

    def leave(self, job: Job, *, at_once: bool = False) -> None:
        """One caller waits no more. Unless `at_once`, a job that may be joined is given `GRACE_S`."""
        job.waiters -= 1
        if job.ask.key and not at_once:
            asyncio.get_running_loop().call_later(GRACE_S, self._abort_unwanted, job)
        else:
            self._abort_unwanted(job)

    def drain(self) -> None:
        """Takes no more rows, and gives back those that have not entered the engine."""
        if not self._draining:
            logger.info("draining: %d rows in the engine, %d given back", self.rows, self.queued)
            self._draining = True
            self._fail_queued("cancelled", "the app is shutting down")

    async def wait_idle(self) -> None:
        """Until no row is queued or in the engine."""
        while self.queued or self.rows:
            self._change.clear()
            await self._change.wait()

    def cancel_all(self) -> None:
        """Fails what is queued or in the engine as `cancelled`."""
        for job in [job for lane in self._lanes for job in (*lane.queue, *lane.running)]:
            self._finish(job, RowResult.failed(job.row_id, "cancelled", "the app is shutting down"))
            if job.task is not None:
                job.task.cancel()

    def stats(self) -> dict[str, Any]:
        """Every field of `BatchStats`, and ours. What the batchers count is that of the batch lane."""
        batch_stats = self.batch.stats
        return {
            **asdict(batch_stats),
            "utilization": batch_stats.utilization,
            **asdict(self._use.read()),
            "queued": self.queued,
            "queued_interactive": len(self.interactive.queue),
            "in_flight": self.rows,
            "in_flight_interactive": self.interactive.rows,
            "in_flight_tokens": self.tokens,
            "max_in_flight": self.max_rows,
            "max_in_flight_tokens": self.max_tokens,
            "max_queue_size": self.batch.max_queue_size,
            "admitted": self.admitted,
            "completed": self.completed,
            "failed": dict(self.failed),
            "aborted": self.aborted,
            "rejected": self.rejected,
            "joined": self.joined,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def _find(self, ask: Ask) -> Job | None:
        """The job that computes it, or one that is done if it was answered of late."""
        if not ask.key:
            return None
        recent = self._recent.get(ask.key)
        if recent is None:
            return self._running.get(ask.key)
        job = Job(ask, time.monotonic())
        job.done.set_result(recent)
        return job

    def _begin(self, ask: Ask, lane: Lane) -> Job:
        job = Job(ask, time.monotonic())
        lane.queue.add(job)
        if ask.key:
            self._running[ask.key] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, lane))
        return job

    def _enlist(self, job: Job) -> Job:
        job.waiters += 1
        return job

    async def _run(self, job: Job, lane: Lane) -> None:
        """From prompt to answer; whatever is raised for the row ends here."""
        try:
            result = await self._compute(job, lane)
        except asyncio.CancelledError:
            result = RowResult.failed(job.row_id, "cancelled", "cancelled by the engine")
        except Exception as exc:
            result = self._failure(job.row_id, exc)
        lane.remove(job)
        self._finish(job, result)
        self._note_use(waiting=False)

    async def _compute(self, job: Job, lane: Lane) -> RowResult:
        row, sampling = job.ask.row, job.ask.sampling
        prompt = await self._engine.render(row)
        room = self._engine.limits.max_model_len - prompt.num_tokens
        job.cost = prompt.num_tokens + min(sampling.max_tokens, room)
        await lane.submit(job)
        await job.admitted
        queued_s = time.monotonic() - job.arrived
        completion = await self._engine.generate(
            prompt, sampling, priority=lane.priority, on_text=job.ask.on_text
        )
        return RowResult(
            id=row.id,
            text=completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=prompt.num_tokens,
            completion_tokens=completion.completion_tokens,
            queued_s=queued_s,
            ttft_s=None if completion.ttft_s is None else queued_s + completion.ttft_s,
            e2e_s=time.monotonic() - job.arrived,
        )

    async def _let_in(self, lane: Lane, jobs: list[Job]) -> list[None]:
        """The `inference_fn` of a lane's batcher."""
        for job in jobs:
            while not job.done.done() and not self._has_room(lane, job):
                self._change.clear()
                self._note_use(waiting=True)
                await self._change.wait()
            if not job.done.done():
                lane.let_in(job)
                self.admitted += 1
        self._note_use(waiting=False)
        return [None] * len(jobs)

    def _has_room(self, lane: Lane, job: Job) -> bool:
        """A lane with nothing in the engine may send any job, so that one over the budget still runs."""
        fits_all = self.rows < self.max_rows and self.tokens + job.cost <= self.max_tokens
        return (fits_all and lane.has_room(job)) or not lane.rows

    def _finish(self, job: Job, result: RowResult) -> None:
        """Answers whoever waits, unless that was done before."""
        if not job.done.done():
            job.done.set_result(self._count(result))
            if job.ask.key and result.error_kind is None:
                self._recent.put(job.ask.key, result)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        for lane in self._lanes:
            lane.queue.discard(job)
        if self._running.get(job.ask.key) is job:
            del self._running[job.ask.key]
        self._change.set()

    def _abort_unwanted(self, job: Job) -> None:
        if job.waiters or job.done.done():
            return
        assert job.task is not None
        self.aborted += 1
        job.done.cancel()
        job.task.cancel()
        self._forget(job)

    def _failure(self, row_id: str, exc: Exception) -> RowResult:
        if isinstance(exc, PromptError):
            return RowResult.failed(row_id, exc.kind, str(exc))
        if isinstance(exc, EngineUnavailable):
            self._die()
        if isinstance(exc, EngineError):
            return RowResult.failed(row_id, KIND_OF_ENGINE_ERROR[type(exc)], str(exc))
        logger.error("a row failed unexpectedly", exc_info=exc)
        return RowResult.failed(row_id, "engine_error", repr(exc))

    def _count(self, result: RowResult) -> RowResult:
        self.prompt_tokens += result.prompt_tokens
        self.completion_tokens += result.completion_tokens
        self.latencies.observe(result)
        if result.error_kind is None:
            self.completed += 1
        else:
            self.failed[result.error_kind] += 1
        return result

    def _fail_queued(self, kind: ErrorKind, error: str) -> None:
        for job in [job for lane in self._lanes for job in lane.queue]:
            self._finish(job, RowResult.failed(job.row_id, kind, error))

    def _note_loop_end(self, _: asyncio.Task[None]) -> None:
        """A batcher's loop that ends before its time would leave the rows in its queue for ever."""
        if not self._draining:
            self._die()
        self._fail_queued("engine_error", "the batcher died")

    def _note_use(self, *, waiting: bool) -> None:
        rows = self.rows
        full = waiting or rows >= self._engine.limits.max_num_seqs
        self._use.update(busy=rows > 0, saturated=full and rows > 0)

    async def _watch(self) -> None:
        """Finds an engine that died with nothing in it."""
        while not self._dead:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                await self._engine.check_health()
            except EngineUnavailable:
                self._die()

    def _die(self) -> None:
        if not self._dead:
            self._dead = True
            logger.error("the engine is dead: %d rows in it, %d waiting", self.rows, self.queued)
            self._fail_queued("engine_error", "the engine died")
            self._on_dead()
