"""How well the engine is used, as the app sees it.

`BatchStats.utilization` of the TokenBatcher is the time spent in its `inference_fn`; here that is
waiting for room, so the two fractions below are measured by us:

- busy: share of time in which at least one row is in the engine;
- saturated: share of time in which as many rows are in the engine as it can run, or rows wait for room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineUse:
    """Fractions between 0 and 1 of `elapsed_s` seconds."""

    busy_fraction: float
    saturated_fraction: float
    elapsed_s: float


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
        return EngineUse(self._busy_s / elapsed_s, self._saturated_s / elapsed_s, elapsed_s)
