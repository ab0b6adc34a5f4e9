"""What can go wrong, as one tree.

    InferenceError
    ├── PromptError            this prompt can never succeed: the row is answered with `kind`
    ├── RequestRefused         this request can never succeed: wrong model, malformed
    │   └── RequestTooLarge    a smaller one may: it has too many rows or bytes
    └── EngineError            try again, here or elsewhere
        ├── EngineTimeout      no answer within the deadline
        ├── EngineOverloaded   no room now; `retry_after_s` says when to ask again
        └── EngineUnavailable  starting, draining or dead; `retry_after_s` as above
    JobError                   an input of a job names something that cannot be used
    RowsLeft                   rows of a chunk failed in a way that may pass: attempt the task again
    AccountingError            rows are missing, doubled or out of order: a bug, and the end of the run

Exceptions of vLLM and httpx are turned into these where they enter.
"""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal[
    "too_long",
    "empty",
    "invalid_prompt",
    "invalid_sampling",
    "invalid_schema",
    "timeout",
    "engine_error",
    "cancelled",
    "overloaded",
]
PERMANENT_KINDS: frozenset[ErrorKind] = frozenset(
    {"too_long", "empty", "invalid_prompt", "invalid_sampling", "invalid_schema"}
)
"""Failures that repeat whenever the same row is sent; every other kind is worth another attempt."""


class InferenceError(Exception):
    """Anything that keeps a prompt from its completion."""


class PromptError(InferenceError):
    """One row is at fault; `kind` is one of `PERMANENT_KINDS`."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RequestRefused(InferenceError):
    """The app answered with a 4xx that no repetition will change."""


class RequestTooLarge(RequestRefused):
    """413: too many rows, or too many bytes."""


class EngineError(InferenceError):
    """The engine failed; the same prompt may succeed later or on another replica."""


class EngineTimeout(EngineError):
    """No completion came within the deadline."""


class EngineOverloaded(EngineError):
    """The queue is full."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine is starting, draining or dead."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JobError(ValueError):
    """An input of a job cannot be used; the message names the field and its value."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={value!r}: {reason}")
        self.field = field


class RowsLeft(Exception):
    """What a chunk's task raises when rows are left to try again."""


class AccountingError(Exception):
    """The files written do not hold what went in."""
