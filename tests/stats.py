"""A snapshot as `/stats` answers it."""

from __future__ import annotations

from typing import Any


def make_stats(**overrides: Any) -> dict[str, Any]:
    """Of a replica that has just started."""
    zeros = (
        "total_submitted total_completed total_batches total_batch_cost avg_batch_size avg_batch_cost "
        "busy_time_s idle_time_s utilization queued in_flight in_flight_tokens admitted completed aborted "
        "rejected joined prompt_tokens completion_tokens busy_s saturated_s elapsed_s busy_fraction "
        "saturated_fraction"
    )
    return {
        **dict.fromkeys(zeros.split(), 0),
        "failed": {},
        "max_in_flight": 512,
        "max_in_flight_tokens": 160_000,
        "max_queue_size": 5_000,
        **overrides,
    }
