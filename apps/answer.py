"""One request of rows: its results as they finish, for a JSON body or for NDJSON lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apps.admission import Admission
from apps.jobs import Job, parse_asks
from apps.schema import NDJSON, Done, GenerateRequest, Heartbeat, RowResult

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Longest silence on a stream."""
LINGER_S = 0.005
"""After a result, for others to share its write: rows of a batch often finish in one step."""
SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long has gone, whatever its connection says."""


class Waiting:
    """The rows of one request that are still to come. `ended` holds the results that have.

    At the deadline the rest is answered with `timeout`, whether anybody reads the answers or not.
    """

    def __init__(self, admission: Admission, jobs: Iterable[Job], deadline_s: float | None) -> None:
        self._admission = admission
        self._jobs = set(jobs)
        self._deadline_s = deadline_s
        self.ended: asyncio.Queue[RowResult | None] = asyncio.Queue()
        """`None` wakes the reader for another reason."""
        for job in self._jobs:
            job.done.add_done_callback(partial(self._put, job))
        loop = asyncio.get_running_loop()
        self._timer = None if deadline_s is None else loop.call_later(deadline_s, self._expire)

    def _put(self, job: Job, done: asyncio.Future[RowResult]) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self.ended.put_nowait(done.result())

    def _expire(self) -> None:
        for job in [job for job in self._jobs if not job.done.done()]:
            self._jobs.remove(job)
            self._admission.leave(job, at_once=True)
            error = f"no completion within {self._deadline_s} s"
            self.ended.put_nowait(RowResult.failed(job.row_id, "timeout", error))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for job in self._jobs:
            self._admission.leave(job)
        self._jobs.clear()

    async def next_results(self) -> list[RowResult]:
        """What has come when a moment has passed since the first; nothing after `HEARTBEAT_S`."""
        some = []
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                some.append(await self.ended.get())
        except TimeoutError:
            return []
        await asyncio.sleep(LINGER_S)
        while not self.ended.empty():
            some.append(self.ended.get_nowait())
        return [result for result in some if result is not None]


async def finished_rows(
    body: GenerateRequest, receive: Receive, admission: Admission
) -> AsyncGenerator[list[RowResult], None]:
    """The results that have come since the last yield; none after a silence of `HEARTBEAT_S`.

    Ends when every row is answered, or when the client has left. However it ends, what nobody waits
    for is aborted. Raises `EngineOverloaded` or `EngineUnavailable` before the first result if there is
    no place for the rows.
    """
    asks, errors = parse_asks(body.rows, body.sampling, body.task_id)
    waiting = Waiting(admission, admission.submit(asks), body.deadline_s)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    gone.add_done_callback(lambda _: waiting.ended.put_nowait(None))
    try:
        num_left = len(asks)
        if errors:
            yield [admission.refuse(row_id, error) for row_id, error in errors]
        while num_left and not gone.done():
            results = await waiting.next_results()
            num_left -= len(results)
            yield results
    finally:
        gone.cancel()
        waiting.close()


async def wait_for_disconnect(receive: Receive) -> None:
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
        try:
            await self._stream(receive, send)
        except TimeoutError:
            logger.warning("a reader took nothing for %.0f s: its stream ends", SEND_TIMEOUT_S)

    async def _stream(self, receive: Receive, send: Send) -> None:
        num_sent = 0
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(finished_rows(self._request, receive, self._admission)) as finished:
            async for results in finished:
                if start:
                    await send(start)
                    start = {}
                lines = b"".join(map(_line, results)) or _line(Heartbeat(heartbeat=True))
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": lines, "more_body": True})
                num_sent += len(results)
        if num_sent == len(self._request.rows):
            await send({"type": "http.response.body", "body": _line(Done(done=True, rows=num_sent))})


def _line(item: RowResult | Heartbeat | Done) -> bytes:
    return item.model_dump_json().encode() + b"\n"
