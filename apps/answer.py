"""One request of rows: its results as they finish, for a JSON body or for NDJSON lines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apps.admission import Admission, Job
from apps.schema import NDJSON, Done, GenerateRequest, Heartbeat, RowResult

HEARTBEAT_S = 5.0
"""Longest silence on a stream."""
LINGER_S = 0.005
"""After a result, for others to share its write: rows of a batch often finish in one step."""


async def finished_rows(
    body: GenerateRequest, receive: Receive, admission: Admission
) -> AsyncGenerator[list[RowResult], None]:
    """The results that have come since the last yield; none after a silence of `HEARTBEAT_S`.

    Ends when every row is answered, or when the client has left. At the deadline unfinished rows are
    answered with `timeout`. However it ends, what nobody waits for is aborted. Raises
    `EngineOverloaded` or `EngineUnavailable` before the first result if there is no place for the rows.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + (body.deadline_s or math.inf)
    ended: asyncio.Queue[Job | None] = asyncio.Queue()
    jobs: list[Job] = []
    left: set[Job] = set()
    at_once: list[RowResult] = []
    with admission.reserve(len(body.rows)) as reservation:
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        gone.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            for row in body.rows:
                entry = admission.submit(row, body.sampling, reservation, body.task_id)
                if isinstance(entry, RowResult):
                    at_once.append(entry)
                else:
                    jobs.append(entry)
                    entry.done.add_done_callback(partial(_put, ended, entry))
            left.update(jobs)
            if at_once:
                yield at_once
            while left and not gone.done():
                some = await _gather(ended, min(HEARTBEAT_S, deadline - now()))
                if now() >= deadline:
                    some = left.copy()
                left -= some
                yield [_answer(job, body.deadline_s) for job in some]
        finally:
            gone.cancel()
            for job in jobs:
                admission.leave(job)


def _put(ended: asyncio.Queue[Job | None], job: Job, _: asyncio.Future[RowResult]) -> None:
    ended.put_nowait(job)


async def _gather(ended: asyncio.Queue[Job | None], timeout_s: float) -> set[Job]:
    """All jobs that have ended a moment after the first; none if the time passes without one."""
    jobs = set()
    try:
        async with asyncio.timeout(timeout_s):
            jobs.add(await ended.get())
    except TimeoutError:
        return set()
    await asyncio.sleep(LINGER_S)
    while not ended.empty():
        jobs.add(ended.get_nowait())
    return {job for job in jobs if job is not None}


def _answer(job: Job, deadline_s: float | None) -> RowResult:
    if job.done.done():
        return job.done.result()
    return RowResult.failed(job.row.id, "timeout", f"no completion within {deadline_s} s")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ResultStream(Response):
    """A line a result as its row finishes, heartbeats while none does, and last the number of rows."""

    media_type = NDJSON

    def __init__(self, body: GenerateRequest, admission: Admission) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._request = body
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_sent = 0
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(finished_rows(self._request, receive, self._admission)) as finished:
            async for results in finished:
                if start:
                    await send(start)
                    start = {}
                lines = b"".join(map(_line, results)) or _line(Heartbeat(heartbeat=True))
                await send({"type": "http.response.body", "body": lines, "more_body": True})
                num_sent += len(results)
        if num_sent == len(self._request.rows):
            await send({"type": "http.response.body", "body": _line(Done(done=True, rows=num_sent))})


def _line(item: RowResult | Heartbeat | Done) -> bytes:
    return item.model_dump_json().encode() + b"\n"
