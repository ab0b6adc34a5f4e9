"""What to change when the engine is not used as it could be, from two readings of the stats.

Follows Flyte's list for a low utilization: more concurrency, a shorter `batch_timeout_s`, a larger
`max_queue_size`, more data streams. Each is advised only where the figures show that it would help.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from apps.metrics import Latencies
from apps.settings import AppSettings

logger = logging.getLogger(__name__)

SATURATED_ENOUGH = 0.9
"""Saturated fraction from which there is nothing to gain."""
VISIBLE_SHARE = 0.05
"""Of the time; what takes less is not worth a change."""


@dataclass(frozen=True)
class Interval:
    """What happened between two readings of the stats, and what they saw of the queue."""

    seconds: float
    busy_fraction: float
    saturated_fraction: float
    admitted: int
    finished: int
    """Rows answered, failed ones included."""
    rejected: int
    prompt_tokens: int
    completion_tokens: int
    batches: int
    batched_rows: int
    batched_tokens: int
    queued: tuple[int, int]
    """Rows that waited at the beginning and at the end."""
    in_flight: int
    """Rows in the engine at the end."""
    max_in_flight: int

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Interval:
        def grown(key: str) -> Any:
            return after[key] - before[key]

        seconds = grown("elapsed_s")
        return cls(
            seconds=seconds,
            busy_fraction=grown("busy_s") / seconds,
            saturated_fraction=grown("saturated_s") / seconds,
            admitted=grown("admitted"),
            finished=grown("completed") + sum(after["failed"].values()) - sum(before["failed"].values()),
            rejected=grown("rejected"),
            prompt_tokens=grown("prompt_tokens"),
            completion_tokens=grown("completion_tokens"),
            batches=grown("total_batches"),
            batched_rows=grown("total_completed"),
            batched_tokens=grown("total_batch_cost"),
            queued=(before["queued"], after["queued"]),
            in_flight=after["in_flight"],
            max_in_flight=after["max_in_flight"],
        )

    def has_traffic(self) -> bool:
        return bool(self.busy_fraction or self.admitted or self.finished or self.rejected)


def advise(interval: Interval, settings: AppSettings) -> list[str]:
    """Lines for an operator; none if the engine was saturated, or nobody asked it for anything."""
    if interval.saturated_fraction >= SATURATED_ENOUGH or not interval.has_traffic():
        return []
    return [
        *_more_concurrency(interval),
        *_shorter_timeout(interval, settings),
        *_larger_queue(interval, settings),
        *_more_streams(interval),
    ]


def _more_concurrency(interval: Interval) -> Iterator[str]:
    share = interval.busy_fraction - interval.saturated_fraction
    if share >= VISIBLE_SHARE and min(interval.queued) == 0:
        yield (
            f"the engine ran with room left and an empty queue for {share:.0%} of the time "
            f"({interval.in_flight} of {interval.max_in_flight} rows in it at its end): "
            "raise the job's max_concurrency (chunks in flight) or chunk_size"
        )


def _shorter_timeout(interval: Interval, settings: AppSettings) -> Iterator[str]:
    """No batch waits longer than the timeout, and no two wait at once."""
    share = interval.batches * settings.batch_timeout_s / interval.seconds
    rows = interval.batched_rows / max(interval.batches, 1)
    tokens = interval.batched_tokens / max(interval.batches, 1)
    is_small = rows < settings.max_batch_size / 2 and tokens < settings.target_batch_tokens / 2
    if share >= VISIBLE_SHARE and is_small:
        yield (
            f"batches of {rows:.1f} rows (at most {settings.max_batch_size}) waited for more rows during up "
            f"to {min(share, 1):.0%} of the time: lower SATURATE_BATCH_TIMEOUT_S "
            f"(now {settings.batch_timeout_s:g})"
        )


def _larger_queue(interval: Interval, settings: AppSettings) -> Iterator[str]:
    if interval.rejected:
        yield (
            f"{interval.rejected} rows were turned away, and the engine was saturated for only "
            f"{interval.saturated_fraction:.0%} of the time: raise SATURATE_MAX_QUEUE_SIZE "
            f"(now {settings.max_queue_size})"
        )


def _more_streams(interval: Interval) -> Iterator[str]:
    share = 1 - interval.busy_fraction
    if share >= VISIBLE_SHARE:
        yield (
            f"the engine stood empty for {share:.0%} of the time: run more drivers at once, each with its "
            "own data, or raise max_concurrency if the job has chunks to spare"
        )


async def watch_use(
    read_stats: Callable[[], Mapping[str, Any]],
    latencies: Latencies,
    settings: AppSettings,
    interval_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Logs the use of every interval with traffic, and advice; runs until it is cancelled.

    An interval in which a job begins or ends says little of the settings, so that advice is given on one
    once rows were admitted in both of its neighbours, too.
    """
    last: deque[Interval] = deque(maxlen=3)
    before = read_stats()
    while True:
        await sleep(interval_s)
        after = read_stats()
        last.append(Interval.between(before, after))
        before = after
        if last[-1].has_traffic():
            logger.info("%s%s", _use_line(last[-1]), _times_line(latencies))
        if len(last) == 3 and all(interval.admitted for interval in last):
            for line in advise(last[1], settings):
                logger.warning("within %.0f s: %s", last[1].seconds, line)


def _use_line(interval: Interval) -> str:
    seconds = interval.seconds
    return (
        f"{interval.finished / seconds:.1f} rows/s, {interval.prompt_tokens / seconds:.0f} prompt and "
        f"{interval.completion_tokens / seconds:.0f} completion tokens/s; engine busy "
        f"{interval.busy_fraction:.0%}, saturated {interval.saturated_fraction:.0%}; "
        f"{interval.queued[1]} rows wait, {interval.in_flight} run"
    )


def _times_line(latencies: Latencies) -> str:
    """Of the rows of late, which may be more or fewer than those of the interval."""
    return "".join(
        f"; {name.removesuffix('_s').upper()} p50 {times.p50:.3g} s, p95 {times.p95:.3g} s"
        for name, times in latencies.quantiles().items()
        if times is not None and name in ("ttft_s", "e2e_s")
    )
