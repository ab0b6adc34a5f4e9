"""What a person sees while a job runs: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar

LINE_INTERVAL_S = 10.0
"""Between two lines where there is no terminal."""


def say(console: Console, message: str) -> None:
    """A line that stays, neither wrapped nor coloured."""
    console.print(message, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def waiting(console: Console, message: str) -> Iterator[None]:
    """Says what is waited for, and how long it took."""
    say(console, message)
    started = time.monotonic()
    bar = Bar(
        SpinnerColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar.add_task("")
    with bar:
        yield
    say(console, f"ready after {time.monotonic() - started:.0f} s")


class Progress:
    """Rows done, completion tokens a second and the time left; a context manager.

    The clock starts on entering. `total` is `None` until the number of rows is known.
    """

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._rows = 0
        self._tokens = 0
        self._bar = Bar(
            TextColumn("rows"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, pace="")

    def __enter__(self) -> Self:
        self._started = self._printed = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.stop()

    def set_total(self, total: int) -> None:
        self._total = total
        self._show()

    def advance(self, rows: int, tokens: int) -> None:
        self._rows += rows
        self._tokens += tokens
        self._show()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _show(self) -> None:
        pace = self._pace()
        self._bar.update(self._task, completed=self._rows, total=self._total, pace=pace)
        if self._bar.disable and time.monotonic() - self._printed >= LINE_INTERVAL_S:
            self._printed = time.monotonic()
            say(self._console, f"{self._rows} of {self._total or '?'} rows, {pace}")

    def _pace(self) -> str:
        pace = f"{self._tokens / max(self.elapsed_s, 1e-9):,.0f} tokens/s"
        if not self._rows or self._total is None:
            return pace
        left_s = self.elapsed_s * (self._total - self._rows) / self._rows
        return f"{pace}, {left_s:.0f} s left"
