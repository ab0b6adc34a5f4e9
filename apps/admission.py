"""Admission: the shared TokenBatcher decides when a row enters the engine, never what runs together.

`TokenBatcher.inference_fn` waits until the engine has room for a row, in rows and in tokens, starts
one task for it, and goes on; the engine batches continuously by itself. What keeps the batcher from
hanging: nothing leaves `_admit`, `min_batch_size` is 1, and a row is submitted only under a
reservation, of which none is given once draining has begun and all are back before it stops.

A row that is sent again under the same task id joins the job that runs for it or lately ran, so that a
retry after a broken connection computes nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
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
from apps.recent import Recent
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
    """A valid row on its way through rendering, queue and engine; several callers may wait for it."""

    row: Row
    sampling: SamplingParams
    key: bytes
    """Digest of all that decides the answer; empty if nobody may join."""
    arrived: float
    cost: int = 0
    """Tokens it may come to hold in the KV cache: its prompt and `max_tokens`."""
    prompt: RenderedPrompt | None = None
    waiters: int = 0
    done: asyncio.Future[RowResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None
    """What works on it now: rendering, or the engine."""


class Reservation:
    """Places in the queue for the rows of a request, given out one by one."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows


class Admission:
    """Between the request handlers and one engine; an async context manager.

    `on_dead` is called once, when the engine or a loop of the batcher is found dead.
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
        self.rows = 0
        """Rows in the engine."""
        self.tokens = 0
        """Tokens that the rows in the engine may come to hold."""
        self.completed = 0
        self.failed = 0
        self.aborted = 0
        self.joined = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._reserved = 0
        self._queue: set[Job] = set()
        """Jobs that are rendered or wait for the engine."""
        self._running: dict[bytes, Job] = {}
        """Unfinished jobs that may be joined."""
        self._recent = Recent()
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
    def queued(self) -> int:
        """Rows that hold a place and are not in the engine yet."""
        return self._reserved + len(self._queue)

    @property
    def loops_alive(self) -> bool:
        """Whether both loops of the batcher run; `TokenBatcher.is_running` stays true when one dies."""
        return all(not task.done() for task in self._loops())

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
        self._reserved += num_rows
        reservation = Reservation(num_rows)
        try:
            yield reservation
        finally:
            self._reserved -= reservation.num_rows
            self._room.set()

    def submit(
        self, raw: RawRow, sampling: SamplingParams, reservation: Reservation, task_id: str = ""
    ) -> Job | RowResult:
        """A job whose `done` will hold the answer and never raises for the row's sake.

        A row that is not valid is answered at once. The caller says `leave` to every job when it does
        not wait any more; a job that nobody waits for is aborted in the engine.
        """
        reservation.num_rows -= 1
        self._reserved -= 1
        try:
            row = parse_row(raw)
            if row.is_blank():
                raise PromptError("empty", "the prompt is empty")
            merged = merge_sampling(sampling, row.sampling)
        except PromptError as exc:
            self._room.set()
            return self._count(self._failure(raw.id, exc))
        key = join_key(task_id, row, merged) if task_id else b""
        if (recent := self._recent.get(key)) is not None:
            self.joined += 1
            self._room.set()
            return recent
        job = self._running.get(key)
        if job is None:
            job = self._begin(Job(row, merged, key, time.monotonic()))
        else:
            self.joined += 1
            self._room.set()
        job.waiters += 1
        return job

    def leave(self, job: Job) -> None:
        """One caller waits no more, for whatever reason."""
        job.waiters -= 1
        if job.waiters or job.done.done():
            return
        self.aborted += 1
        job.done.cancel()
        self._forget(job)
        if job.task is not None:
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
            "joined": self.joined,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def _begin(self, job: Job) -> Job:
        self._queue.add(job)
        if job.key:
            self._running[job.key] = job
        job.task = asyncio.get_running_loop().create_task(self._prepare(job))
        return job

    async def _prepare(self, job: Job) -> None:
        """Renders the row and hands it to the batcher."""
        try:
            job.prompt = await self._engine.render(job.row)
            room = self._engine.limits.max_model_len - job.prompt.num_tokens
            job.cost = job.prompt.num_tokens + min(job.sampling.max_tokens, room)
            await self._batcher.submit(job, estimated_tokens=job.cost)
        except asyncio.CancelledError:
            self._finish(job, RowResult.failed(job.row.id, "cancelled", "cancelled while rendering"))
            raise
        except Exception as exc:
            self._finish(job, self._failure(job.row.id, exc))

    async def _admit(self, jobs: list[Job]) -> list[asyncio.Task[None] | None]:
        """The batcher's `inference_fn`: one handle a job, `None` for those that nobody waits for."""
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
        self._queue.discard(job)
        self.rows += 1
        self.tokens += job.cost
        job.task = asyncio.get_running_loop().create_task(self._generate(job))
        job.task.add_done_callback(lambda _: self._settle(job))
        return job.task

    async def _generate(self, job: Job) -> None:
        assert job.prompt is not None
        queued_s = time.monotonic() - job.arrived
        try:
            completion = await self._engine.generate(job.prompt, job.sampling)
            result = RowResult(
                id=job.row.id,
                text=completion.text,
                finish_reason=completion.finish_reason,
                prompt_tokens=job.prompt.num_tokens,
                completion_tokens=completion.completion_tokens,
                ttft_s=None if completion.ttft_s is None else queued_s + completion.ttft_s,
            )
        except Exception as exc:
            result = self._failure(job.row.id, exc)
        result.queued_s = queued_s
        result.e2e_s = time.monotonic() - job.arrived
        self._finish(job, result)

    def _settle(self, job: Job) -> None:
        """A done-callback, because it also runs for a task that is cancelled before its first step."""
        self.rows -= 1
        self.tokens -= job.cost
        self._finish(job, RowResult.failed(job.row.id, "cancelled", "cancelled by the engine"))
        self._note_use(waiting=False)
        self._room.set()

    def _finish(self, job: Job, result: RowResult) -> None:
        """Answers whoever waits, unless that was done before."""
        if job.done.done():
            return
        job.done.set_result(self._count(result))
        self._forget(job)
        if job.key and result.error_kind is None:
            self._recent.put(job.key, result)

    def _forget(self, job: Job) -> None:
        self._queue.discard(job)
        self._running.pop(job.key, None)
        self._room.set()

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

    def _count(self, result: RowResult) -> RowResult:
        self.prompt_tokens += result.prompt_tokens
        self.completion_tokens += result.completion_tokens
        if result.error_kind is None:
            self.completed += 1
        else:
            self.failed += 1
        return result

    def _loops(self) -> list[asyncio.Task[None]]:
        tasks = (self._batcher._aggregator_task, self._batcher._consumer_task)
        return [task for task in tasks if task is not None]

    def _note_loop_end(self, _: asyncio.Task[None]) -> None:
        """A loop that ends before its time would leave the rows in the queue waiting for ever."""
        if not self._draining:
            self._die()
        for job in list(self._queue):
            self._finish(job, RowResult.failed(job.row.id, "engine_error", "the batcher died"))

    def _note_use(self, *, waiting: bool) -> None:
        full = waiting or self.rows >= self._engine.limits.max_num_seqs
        self._use.update(busy=self.rows > 0, saturated=full and self.rows > 0)

    def _die(self) -> None:
        if not self._dead:
            self._dead = True
            logger.error("the engine is dead: %d rows in it, %d waiting", self.rows, self.queued)
            self._on_dead()


def join_key(task_id: str, row: Row, sampling: SamplingParams) -> bytes:
    """Of one replica, and so of one model and revision."""
    text = "\0".join((task_id, row.model_dump_json(), sampling.model_dump_json()))
    return blake2b(text.encode(), digest_size=16).digest()
