"""Busy and saturated time, with the clock in hand, and the times of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from apps.metrics import WINDOW_ROWS, Latencies, Quantiles, UseClock, tpot_s
from apps.schema import RowResult


def test_fractions_integrate_over_time() -> None:
    now = 100.0
    clock = UseClock(lambda: now)
    now += 2
    clock.update(busy=True, saturated=False)
    now += 3
    clock.update(busy=True, saturated=True)
    now += 5
    use = clock.read()
    assert (use.busy_fraction, use.saturated_fraction) == pytest.approx((0.8, 0.5))
    assert use.elapsed_s == pytest.approx(10)


def test_a_state_lasts_until_it_changes() -> None:
    now = 0.0
    clock = UseClock(lambda: now)
    clock.update(busy=True, saturated=True)
    now += 4
    assert clock.read().busy_fraction == pytest.approx(1)
    now += 4
    clock.update(busy=False, saturated=False)
    now += 8
    assert clock.read().busy_fraction == pytest.approx(0.5)


def test_seconds_belong_to_the_fractions() -> None:
    now = 0.0
    clock = UseClock(lambda: now)
    clock.update(busy=True, saturated=True)
    now += 3
    clock.update(busy=True, saturated=False)
    now += 1
    clock.update(busy=False, saturated=False)
    now += 4
    use = clock.read()
    assert (use.busy_s, use.saturated_s, use.elapsed_s) == (4, 3, 8)
    assert (use.busy_fraction, use.saturated_fraction) == (0.5, 0.375)


def make_result(**overrides: Any) -> RowResult:
    """A row that waited one second, and whose 11 tokens came from the second second to the seventh."""
    whole = {"id": "a", "text": "4", "completion_tokens": 11, "queued_s": 1.0, "ttft_s": 2.0, "e2e_s": 7.0}
    return RowResult(**{**whole, **overrides})


def read(latencies: Latencies) -> dict[str, float]:
    """Value by sample, buckets as `name<=bound`."""
    families = text_string_to_metric_families(generate_latest(latencies).decode())
    return {
        "<=".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_times_go_to_the_histogram_of_their_name() -> None:
    latencies = Latencies()
    latencies.observe(make_result())
    samples = read(latencies)
    sums = {name: value for name, value in samples.items() if name.endswith("_sum")}
    assert sums == {
        "saturate_queued_seconds_sum": 1,
        "saturate_time_to_first_token_seconds_sum": 2,
        "saturate_time_per_output_token_seconds_sum": 0.5,
        "saturate_e2e_seconds_sum": 7,
    }


def test_buckets_count_what_is_at_most_their_bound() -> None:
    latencies = Latencies()
    for e2e_s in (0.0001, 5.0, 5.1, 90_000.0):
        latencies.observe(make_result(e2e_s=e2e_s))
    samples = read(latencies)
    bounds = ("0.001", "2.0", "5.0", "10.0", "3600.0", "+Inf")
    assert [samples[f"saturate_e2e_seconds_bucket<={bound}"] for bound in bounds] == [1, 1, 2, 3, 3, 4]
    assert samples["saturate_e2e_seconds_count"] == 4


def test_failed_rows_have_no_times() -> None:
    latencies = Latencies()
    latencies.observe(make_result(error_kind="timeout", error="late", text=None))
    assert read(latencies)["saturate_queued_seconds_count"] == 0
    assert set(latencies.quantiles().values()) == {None}


@pytest.mark.parametrize(
    ("overrides", "unknown"),
    [({"completion_tokens": 1}, {"tpot_s"}), ({"ttft_s": None}, {"ttft_s", "tpot_s"})],
    ids=["one token", "no first token"],
)
def test_a_time_that_is_not_defined_is_left_out(overrides: dict[str, Any], unknown: set[str]) -> None:
    latencies = Latencies()
    latencies.observe(make_result(**overrides))
    assert {name for name, values in latencies.quantiles().items() if values is None} == unknown


@pytest.mark.parametrize(("tokens", "expected"), [(0, None), (1, None), (2, 6.0), (4, 2.0)])
def test_tpot_leaves_out_the_first_token(tokens: int, expected: float | None) -> None:
    assert tpot_s(7.0, 1.0, tokens) == expected


@given(st.lists(st.floats(0, 4_000), min_size=1, max_size=50))
def test_quantiles_are_those_of_numpy(times: list[float]) -> None:
    latencies = Latencies()
    for e2e_s in times:
        latencies.observe(make_result(e2e_s=e2e_s))
    quantiles = latencies.quantiles()["e2e_s"]
    assert quantiles is not None
    assert [quantiles.p50, quantiles.p95, quantiles.p99] == pytest.approx(np.percentile(times, [50, 95, 99]))


def test_quantiles_forget_old_rows() -> None:
    latencies = Latencies()
    for e2e_s in [1000.0] * WINDOW_ROWS + [2.0] * WINDOW_ROWS:
        latencies.observe(make_result(e2e_s=e2e_s))
    assert latencies.quantiles()["e2e_s"] == Quantiles(2.0, 2.0, 2.0)
    assert read(latencies)["saturate_e2e_seconds_count"] == 2 * WINDOW_ROWS
