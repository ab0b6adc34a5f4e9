"""Answers of late, for rows that are sent again: bounded in number, text and age."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from apps.schema import RowResult

MAX_RESULTS = 20_000
MAX_CHARS = 64_000_000
"""Of completion text, which is nearly all that a result weighs."""
MAX_AGE_S = 600.0
"""A client that lost its connection asks again within seconds, a task that is retried within minutes."""


class Recent:
    """The oldest answers leave first; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._results: OrderedDict[bytes, tuple[float, RowResult]] = OrderedDict()
        self._num_chars = 0

    def get(self, key: bytes) -> RowResult | None:
        entry = self._results.get(key)
        is_fresh = entry is not None and entry[0] >= self._clock() - MAX_AGE_S
        return entry[1] if entry and is_fresh else None

    def put(self, key: bytes, result: RowResult) -> None:
        self._remove(key)
        self._results[key] = (self._clock(), result)
        self._num_chars += len(result.text or "")
        self._drop_old()

    def _drop_old(self) -> None:
        limit = self._clock() - MAX_AGE_S
        while self._results and (
            len(self._results) > MAX_RESULTS
            or self._num_chars > MAX_CHARS
            or next(iter(self._results.values()))[0] < limit
        ):
            self._remove(next(iter(self._results)))

    def _remove(self, key: bytes) -> None:
        entry = self._results.pop(key, None)
        if entry is not None:
            self._num_chars -= len(entry[1].text or "")
