"""Busy and saturated fractions, with the clock in hand."""

from __future__ import annotations

import pytest

from apps.metrics import UseClock


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
