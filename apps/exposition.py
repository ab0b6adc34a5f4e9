"""What `/metrics` answers: our numbers, and beside them vLLM's under their own names.

What the app counts anyway is read when somebody asks, so that counting costs the rows nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from apps.errors import ErrorKind

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `exposition` returns, and what every version of Prometheus reads."""

GAUGES = {
    "saturate_queued_rows": ("queued", "Rows that wait for the engine."),
    "saturate_in_flight_rows": ("in_flight", "Rows in the engine."),
    "saturate_in_flight_tokens": (
        "in_flight_tokens",
        "Tokens that the rows in the engine may come to hold: prompt and max_tokens.",
    ),
    "saturate_max_queued_rows": ("max_queue_size", "Rows that may wait before requests are answered 429."),
    "saturate_max_in_flight_rows": ("max_in_flight", "Rows that the engine is given at most."),
    "saturate_max_in_flight_tokens": ("max_in_flight_tokens", "Tokens that the engine is given at most."),
}
"""Name to its key in the stats and its meaning."""

COUNTERS = {
    "saturate_rows_admitted_total": ("admitted", "Rows handed to the engine."),
    "saturate_rows_completed_total": ("completed", "Rows answered with a completion."),
    "saturate_rows_aborted_total": ("aborted", "Rows given up because nobody waited for them any more."),
    "saturate_rows_rejected_total": ("rejected", "Rows of requests that were answered 429."),
    "saturate_rows_joined_total": ("joined", "Rows sent again that joined one running or lately finished."),
    "saturate_prompt_tokens_total": ("prompt_tokens", "Prompt tokens of the rows answered."),
    "saturate_completion_tokens_total": ("completion_tokens", "Generated tokens of the rows answered."),
    "saturate_busy_seconds_total": ("busy_s", "Time with at least one row in the engine."),
    "saturate_saturated_seconds_total": (
        "saturated_s",
        "Time with as many rows in the engine as it can run, or with rows waiting for room.",
    ),
    "saturate_batcher_submitted_rows_total": ("total_submitted", "Rows submitted to the TokenBatcher."),
    "saturate_batcher_completed_rows_total": ("total_completed", "Rows that the TokenBatcher passed on."),
    "saturate_batcher_batches_total": ("total_batches", "Batches that the TokenBatcher passed on."),
    "saturate_batcher_batch_tokens_total": ("total_batch_cost", "Estimated tokens of those batches."),
    "saturate_batcher_busy_seconds_total": (
        "busy_time_s",
        "Time that the TokenBatcher waited for room in the engine.",
    ),
    "saturate_batcher_idle_seconds_total": ("idle_time_s", "Time that the TokenBatcher waited for rows."),
}
"""As `GAUGES`."""

FAILED = "saturate_rows_failed_total"


class StatsCollector:
    """A Prometheus collector of the numbers that `/stats` answers; `read_stats` returns them."""

    def __init__(self, read_stats: Callable[[], Mapping[str, Any]]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for name, (key, meaning) in GAUGES.items():
            yield GaugeMetricFamily(name, meaning, stats[key])
        for name, (key, meaning) in COUNTERS.items():
            yield CounterMetricFamily(name, meaning, stats[key])
        failed = CounterMetricFamily(FAILED, "Rows answered with an error, by its kind.", labels=["kind"])
        for kind in get_args(ErrorKind):
            failed.add_metric([kind], stats["failed"].get(kind, 0))
        yield failed


async def exposition(*ours: Collector, gpus: Collector, engine: Collector = REGISTRY) -> bytes:
    """Our collectors, the GPUs, and what vLLM (and the Python process) registered where it always does.

    Those that are not ours are read in a thread: NVML and `/proc` may block.
    """
    others = await asyncio.to_thread(_render, gpus, engine)
    return _render(*ours) + others


def _render(*collectors: Collector) -> bytes:
    return b"".join(map(generate_latest, collectors))
