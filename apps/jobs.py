"""A row on its way to an answer: asked for, valid, and then a job that several callers may wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from apps.errors import PromptError
from apps.schema import RawRow, Row, RowResult, SamplingParams, merge_sampling, parse_row


@dataclass(frozen=True)
class Ask:
    """A valid row to compute."""

    row: Row
    sampling: SamplingParams
    key: bytes = b""
    """Digest of all that decides the answer; asks of one key share a job. Empty if nobody may join."""
    on_text: Callable[[str], None] | None = None
    """Takes each new piece of the completion; the pieces joined are its text."""


@dataclass(eq=False)
class Job:
    """One computation of an `Ask`. `done` never raises for the row's sake."""

    ask: Ask
    arrived: float
    cost: int = 0
    """Tokens it may come to hold in the KV cache: its prompt and `max_tokens`."""
    waiters: int = 0
    is_in_engine: bool = False
    done: asyncio.Future[RowResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None

    @property
    def row_id(self) -> str:
        return self.ask.row.id


def parse_ask(raw: RawRow, sampling: SamplingParams, task_id: str) -> Ask:
    """Under a `task_id` the row may be joined. Raises `PromptError` for a row that is not valid."""
    row = parse_row(raw)
    if row.is_blank():
        raise PromptError("empty", "the prompt is empty")
    merged = merge_sampling(sampling, row.sampling)
    return Ask(row, merged, join_key(task_id, row, merged) if task_id else b"")


def join_key(task_id: str, row: Row, sampling: SamplingParams) -> bytes:
    """Of one replica, and so of one model and revision."""
    text = "\0".join((task_id, row.model_dump_json(), sampling.model_dump_json()))
    return blake2b(text.encode(), digest_size=16).digest()
