"""How well the engine is used, and how long rows take, as the app sees it.

`BatchStats.utilization` of the TokenBatcher is the time spent in its `inference_fn`; here that is
waiting for room, so the two fractions below are measured by us:

- busy: share of time in which at least one row is in the engine;
- saturated: share of time in which as many rows are in the engine as it can run, or rows wait for room.

A row's times, from its arrival in the app: queued, until the hand-over to the engine; TTFT, until the
first token; E2E, until the last. TPOT is what `tpot_s` computes from them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from apps.schema import RowResult

BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
"""Upper bounds: from a step of a small model to the longest that a request may take."""

WINDOW_ROWS = 2_000
"""Rows whose times `Latencies.quantiles` sorts: two milliseconds on the event loop."""


@dataclass(frozen=True)
class EngineUse:
    """Seconds in each state since the start, and their fractions of `elapsed_s`."""

    busy_s: float
    saturated_s: float
    elapsed_s: float
    busy_fraction: float
    saturated_fraction: float


class UseClock:
    """Integrates the two states over time; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._changed = clock()
        self._busy = self._saturated = False
        self._busy_s = self._saturated_s = 0.0

    def update(self, *, busy: bool, saturated: bool) -> None:
        """Call at every change of state."""
        now = self._clock()
        self._busy_s += (now - self._changed) * self._busy
        self._saturated_s += (now - self._changed) * self._saturated
        self._changed, self._busy, self._saturated = now, busy, saturated

    def read(self) -> EngineUse:
        self.update(busy=self._busy, saturated=self._saturated)
        elapsed_s = max(self._changed - self._started, 1e-9)
        return EngineUse(
            busy_s=self._busy_s,
            saturated_s=self._saturated_s,
            elapsed_s=elapsed_s,
            busy_fraction=self._busy_s / elapsed_s,
            saturated_fraction=self._saturated_s / elapsed_s,
        )


def tpot_s(e2e_s: float, ttft_s: float, completion_tokens: int) -> float | None:
    """Seconds per output token after the first, as `vllm/benchmarks/serve.py` has it.

    `None` below two tokens: nothing follows the first.
    """
    return (e2e_s - ttft_s) / (completion_tokens - 1) if completion_tokens > 1 else None


@dataclass(frozen=True)
class Quantiles:
    p50: float
    p95: float
    p99: float


class Latency:
    """One of a row's times: a histogram since the start, and the values of late."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._recent: deque[float] = deque(maxlen=WINDOW_ROWS)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds
        self._recent.append(seconds)

    def quantiles(self) -> Quantiles | None:
        """`None` if nothing was observed."""
        if not self._recent:
            return None
        ordered = sorted(self._recent)
        return Quantiles(*(_quantile(ordered, share) for share in (0.5, 0.95, 0.99)))

    def as_histogram(self, name: str, meaning: str) -> Metric:
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        cumulated = accumulate(self._counts)
        return HistogramMetricFamily(name, meaning, list(zip(bounds, cumulated, strict=True)), self._sum_s)


class Latencies:
    """The times of rows that succeeded; a Prometheus collector.

    Counts by itself because `observe` runs once a row on the event loop, where four histograms of
    prometheus_client, each behind locks, cost more than three times as much.
    """

    def __init__(self) -> None:
        self._queued = Latency()
        self._ttft = Latency()
        self._tpot = Latency()
        self._e2e = Latency()

    def observe(self, result: RowResult) -> None:
        """Call once for each row that finishes; a failed one is passed over."""
        if result.error_kind is not None or result.e2e_s is None or result.queued_s is None:
            return
        self._queued.observe(result.queued_s)
        self._e2e.observe(result.e2e_s)
        if result.ttft_s is None:
            return
        self._ttft.observe(result.ttft_s)
        per_token_s = tpot_s(result.e2e_s, result.ttft_s, result.completion_tokens)
        if per_token_s is not None:
            self._tpot.observe(per_token_s)

    def quantiles(self) -> dict[str, Quantiles | None]:
        """Seconds, over the last `WINDOW_ROWS` rows; `None` without any."""
        return {
            "queued_s": self._queued.quantiles(),
            "ttft_s": self._ttft.quantiles(),
            "tpot_s": self._tpot.quantiles(),
            "e2e_s": self._e2e.quantiles(),
        }

    def collect(self) -> Iterator[Metric]:
        yield self._queued.as_histogram(
            "saturate_queued_seconds", "From a row's arrival to its hand-over to the engine."
        )
        yield self._ttft.as_histogram(
            "saturate_time_to_first_token_seconds", "From a row's arrival to its first token."
        )
        yield self._tpot.as_histogram(
            "saturate_time_per_output_token_seconds", "Between two tokens of a row, on average."
        )
        yield self._e2e.as_histogram("saturate_e2e_seconds", "From a row's arrival to its last token.")


def _quantile(ordered: list[float], share: float) -> float:
    """Between the two nearest values in proportion, as `numpy.percentile` does."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
