"""A row on its way to an answer: asked for, valid, and then a job that several callers may wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from pydantic import TypeAdapter

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


def parse_asks(
    rows: Iterable[RawRow], sampling: SamplingParams, task_id: str = ""
) -> tuple[list[Ask], list[tuple[str, PromptError]]]:
    """The valid rows, and id and error of the others. Under a `task_id` rows may be joined."""
    asks: list[Ask] = []
    errors: list[tuple[str, PromptError]] = []
    shared = _Shared(sampling, task_id)
    for raw in rows:
        try:
            asks.append(shared.parse(raw))
        except PromptError as exc:
            errors.append((raw.id, exc))
    return asks, errors


class _Shared:
    """What the rows of a request have in common, and its digest, which most rows' keys begin with."""

    def __init__(self, sampling: SamplingParams, task_id: str) -> None:
        self._sampling = sampling
        self._task_id = task_id
        self._digest = self._begin(sampling)

    def parse(self, raw: RawRow) -> Ask:
        row = parse_row(raw)
        if row.is_blank():
            raise PromptError("empty", "the prompt is empty")
        if not row.sampling:
            return Ask(row, self._sampling, self._key(row, self._digest))
        sampling = merge_sampling(self._sampling, row.sampling)
        return Ask(row, sampling, self._key(row, self._begin(sampling)))

    def _begin(self, sampling: SamplingParams) -> blake2b:
        return blake2b(f"{self._task_id}\0{sampling.model_dump_json()}\0".encode(), digest_size=16)

    def _key(self, row: Row, shared: blake2b) -> bytes:
        """Of one replica, and so of one model and revision."""
        if not self._task_id:
            return b""
        digest = shared.copy()
        digest.update(ROW.dump_json(row, exclude={"sampling"}))
        return digest.digest()


ROW = TypeAdapter(Row)
