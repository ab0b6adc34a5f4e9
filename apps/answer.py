"""One request of rows: its results as they finish, for a JSON body or for NDJSON lines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

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
    ended: asyncio.Queue[asyncio.Future[RowResult] | None] = asyncio.Queue()
    with admission.reserve(len(body.rows)) as reservation:
        entries = [admission.submit(row, body.sampling, reservation, body.task_id) for row in body.rows]
        jobs = [entry for entry in entries if isinstance(entry, Job)]
        for job in jobs:
            job.done.add_done_callback(ended.put_nowait)
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        gone.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            if at_once := [entry for entry in entries if isinstance(entry, RowResult)]:
                yield at_once
            num_left = len(jobs)
            while num_left and not gone.done():
                results = await _gather(ended, min(HEARTBEAT_S, deadline - now()))
                num_left -= len(results)
                yield results
                if now() >= deadline and num_left:
                    yield [_timed_out(job, body.deadline_s) for job in jobs if not job.done.done()]
                    return
        finally:
            gone.cancel()
            for job in jobs:
                job.done.remove_done_callback(ended.put_nowait)
                admission.leave(job)


async def _gather(
    ended: asyncio.Queue[asyncio.Future[RowResult] | None], timeout_s: float
) -> list[RowResult]:
    """All results that are there a moment after the first; none if the time passes without one."""
    futures = []
    try:
        async with asyncio.timeout(timeout_s):
            futures.append(await ended.get())
    except TimeoutError:
        return []
    await asyncio.sleep(LINGER_S)
    while not ended.empty():
        futures.append(ended.get_nowait())
    return [future.result() for future in futures if future is not None]


def _timed_out(job: Job, deadline_s: float | None) -> RowResult:
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
