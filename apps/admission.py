"""Admission: the shared TokenBatcher decides when a row enters the engine, never what runs together.

`TokenBatcher.inference_fn` waits until the engine has room for a row, in rows and in tokens, starts
one task for it, and goes on; the engine batches continuously by itself. What keeps the batcher from
hanging: nothing leaves `_admit`, `min_batch_size` is 1, and a row is submitted only under a
reservation, of which none is given once draining has begun and all are back before it stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from flyte.extras import TokenBatcher

from apps.engines.base import Engine, RenderedPrompt
from apps.errors import (
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    ErrorKind,
    PromptError,
)
from apps.metrics import UseClock
from apps.schema import RawRow, Row, RowResult, SamplingParams, merge_sampling, parse_row
from apps.settings import ROWS_IN_FLIGHT_PER_SEQ, AppSettings

logger = logging.getLogger(__name__)

KIND_OF_ENGINE_ERROR: dict[type[EngineError], ErrorKind] = {
    EngineTimeout: "timeout",
    EngineOverloaded: "overloaded",
    EngineUnavailable: "engine_error",
    EngineError: "engine_error",
}


@dataclass(eq=False)
class Job:
    """A rendered row on its way through the batcher into the engine."""

    row_id: str
    prompt: RenderedPrompt
    sampling: SamplingParams
    cost: int
    """Tokens it may come to hold in the KV cache: its prompt and `max_tokens`."""
    arrived: float
    done: asyncio.Future[RowResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None


@dataclass
class Reservation:
    """Places in the queue, given out one by one to the rows of a request."""

    num_rows: int


class Admission:
    """Between the request handlers and one engine; an async context manager.

    `on_dead` is called once, when the engine reports that it is dead.
    """

    def __init__(
        self, engine: Engine, settings: AppSettings, on_dead: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._on_dead = on_dead
        limits = engine.limits
        self.max_queue_size = settings.max_queue_size
        self.max_rows = ROWS_IN_FLIGHT_PER_SEQ * limits.max_num_seqs
        self.max_tokens = ROWS_IN_FLIGHT_PER_SEQ * limits.kv_cache_tokens
        self.queued = 0
        """Rows that hold a reservation and are not in the engine yet."""
        self.rows = 0
        """Rows in the engine."""
        self.tokens = 0
        """Tokens that the rows in the engine may come to hold."""
        self.completed = 0
        self.failed = 0
        self.aborted = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._waiting: set[Job] = set()
        """Submitted to the batcher and not in the engine yet."""
        self._room = asyncio.Event()
        self._use = UseClock()
        self._draining = False
        self._dead = False
        self._batcher = TokenBatcher[Job, asyncio.Task[None] | None](
            inference_fn=self._admit,
            target_batch_tokens=settings.target_batch_tokens,
            max_batch_size=settings.max_batch_size,
            batch_timeout_s=settings.batch_timeout_s,
            max_queue_size=settings.max_queue_size,
        )

    async def __aenter__(self) -> Self:
        await self._batcher.start()
        for task in self._loops():
            task.add_done_callback(self._note_loop_end)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Waits for every row that holds a reservation, then stops the batcher."""
        self._draining = True
        while self.queued or self.rows:
            self._room.clear()
            await self._room.wait()
        if self.loops_alive:
            await self._batcher.stop()

    @property
    def loops_alive(self) -> bool:
        """Whether both loops of the batcher run; `TokenBatcher.is_running` stays true when one dies."""
        return all(not task.done() for task in self._loops())

    def _loops(self) -> list[asyncio.Task[None]]:
        tasks = (self._batcher._aggregator_task, self._batcher._consumer_task)
        return [task for task in tasks if task is not None]

    def _note_loop_end(self, _: asyncio.Task[None]) -> None:
        """A loop that ends before its time would leave the rows in the queue waiting for ever."""
        if not self._draining:
            self._die()
            for job in self._waiting:
                if not job.done.done():
                    job.done.set_result(RowResult.failed(job.row_id, "engine_error", "the batcher died"))

    def check_open(self) -> None:
        """Raises `EngineUnavailable` when no row can be taken any more."""
        if self._dead or not self.loops_alive:
            raise EngineUnavailable("the engine is dead", retry_after_s=30.0)
        if self._draining:
            raise EngineUnavailable("the replica is shutting down", retry_after_s=5.0)

    @contextmanager
    def reserve(self, num_rows: int) -> Iterator[Reservation]:
        """Room in the queue for a whole request; what was not used is given back on leaving.

        Raises `EngineOverloaded` if the queue cannot take it now, `EngineUnavailable` if it never will.
        """
        self.check_open()
        if self.queued + num_rows > self.max_queue_size:
            raise EngineOverloaded(
                f"{self.queued} rows wait, {num_rows} more exceed the queue of {self.max_queue_size}"
            )
        self.queued += num_rows
        reservation = Reservation(num_rows)
        try:
            yield reservation
        finally:
            self._leave_queue(reservation.num_rows)

    async def run(self, raw: RawRow, sampling: SamplingParams, reservation: Reservation) -> RowResult:
        """Answers one row and never raises for its sake; cancelling it aborts the row in the engine."""
        arrived = time.monotonic()
        reservation.num_rows -= 1
        job: Job | None = None
        try:
            job = await self._prepare(raw, sampling, arrived)
            self._waiting.add(job)
            await self._batcher.submit(job, estimated_tokens=job.cost)
            result = await job.done
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except Exception as exc:
            result = self._failure(raw.id, exc)
        finally:
            if job is None or job.task is None:
                self._leave_queue(1)
            if job is not None:
                self._abandon(job)
        self._count(result)
        return result

    def _abandon(self, job: Job) -> None:
        """Nobody waits for `job` any more: if it is not done, it never will be."""
        self._waiting.discard(job)
        job.done.cancel()
        if job.task is not None and job.done.cancelled():
            job.task.cancel()

    def stats(self) -> dict[str, Any]:
        """Every field of `BatchStats`, and ours."""
        batch_stats = self._batcher.stats
        return {
            **asdict(batch_stats),
            "utilization": batch_stats.utilization,
            **asdict(self._use.read()),
            "queued": self.queued,
            "in_flight": self.rows,
            "in_flight_tokens": self.tokens,
            "max_in_flight": self.max_rows,
            "max_in_flight_tokens": self.max_tokens,
            "max_queue_size": self.max_queue_size,
            "completed": self.completed,
            "failed": self.failed,
            "aborted": self.aborted,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    async def _prepare(self, raw: RawRow, sampling: SamplingParams, arrived: float) -> Job:
        row: Row = parse_row(raw)
        if row.is_blank():
            raise PromptError("empty", "the prompt is empty")
        merged = merge_sampling(sampling, row.sampling)
        prompt = await self._engine.render(row)
        room = self._engine.limits.max_model_len - prompt.num_tokens
        cost = prompt.num_tokens + min(merged.max_tokens, room)
        return Job(row.id, prompt, merged, cost, arrived)

    async def _admit(self, jobs: list[Job]) -> list[asyncio.Task[None] | None]:
        """The batcher's `inference_fn`: one handle a job, `None` for those whose caller has left."""
        handles: list[asyncio.Task[None] | None] = []
        for job in jobs:
            while not self._has_room(job) and not job.done.done():
                self._room.clear()
                self._note_use(waiting=True)
                await self._room.wait()
            handles.append(None if job.done.done() else self._start(job))
        self._note_use(waiting=False)
        return handles

    def _has_room(self, job: Job) -> bool:
        """An engine with nothing in it takes any job, so that one over the budget still runs."""
        fits = self.rows < self.max_rows and self.tokens + job.cost <= self.max_tokens
        return fits or not self.rows or self._dead

    def _start(self, job: Job) -> asyncio.Task[None]:
        self._waiting.discard(job)
        self.rows += 1
        self.tokens += job.cost
        self._leave_queue(1)
        job.task = asyncio.get_running_loop().create_task(self._generate(job))
        job.task.add_done_callback(lambda _: self._settle(job))
        return job.task

    def _settle(self, job: Job) -> None:
        """A done-callback, because it also runs for a task that is cancelled before its first step."""
        self.rows -= 1
        self.tokens -= job.cost
        if not job.done.done():
            job.done.set_result(RowResult.failed(job.row_id, "cancelled", "cancelled by the engine"))
        self._note_use(waiting=False)
        self._room.set()

    def _leave_queue(self, num_rows: int) -> None:
        self.queued -= num_rows
        self._room.set()

    def _note_use(self, *, waiting: bool) -> None:
        full = waiting or self.rows >= self._engine.limits.max_num_seqs
        self._use.update(busy=self.rows > 0, saturated=full and self.rows > 0)

    async def _generate(self, job: Job) -> None:
        started = time.monotonic()
        queued_s = started - job.arrived
        try:
            completion = await self._engine.generate(job.prompt, job.sampling)
            result = RowResult(
                id=job.row_id,
                text=completion.text,
                finish_reason=completion.finish_reason,
                prompt_tokens=job.prompt.num_tokens,
                completion_tokens=completion.completion_tokens,
                ttft_s=None if completion.ttft_s is None else queued_s + completion.ttft_s,
            )
        except Exception as exc:
            result = self._failure(job.row_id, exc)
        result.queued_s = queued_s
        result.e2e_s = time.monotonic() - job.arrived
        if not job.done.done():
            job.done.set_result(result)

    def _failure(self, row_id: str, exc: Exception) -> RowResult:
        """A failed row is an answer: whatever was raised for it ends here."""
        if isinstance(exc, PromptError):
            return RowResult.failed(row_id, exc.kind, str(exc))
        if isinstance(exc, EngineUnavailable):
            self._die()
        if isinstance(exc, EngineError):
            return RowResult.failed(row_id, KIND_OF_ENGINE_ERROR[type(exc)], str(exc))
        logger.error("a row failed unexpectedly", exc_info=exc)
        return RowResult.failed(row_id, "engine_error", repr(exc))

    def _die(self) -> None:
        if not self._dead:
            self._dead = True
            logger.error("the engine is dead: %d rows in it, %d waiting", self.rows, self.queued)
            self._on_dead()

    def _count(self, result: RowResult) -> None:
        self.prompt_tokens += result.prompt_tokens
        self.completion_tokens += result.completion_tokens
        if result.error_kind is None:
            self.completed += 1
        else:
            self.failed += 1
