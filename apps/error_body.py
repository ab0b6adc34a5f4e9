"""Errors over HTTP: one body for every route, the one that OpenAI's clients understand."""

from __future__ import annotations

import math
from typing import Any

from fastapi import Response
from pydantic import BaseModel

from apps.errors import PERMANENT_KINDS, EngineOverloaded, EngineUnavailable, ErrorKind
from apps.schema import RowResult, as_error

CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
"""Where the caller names none."""
STATUS_OF_RETRYABLE: dict[ErrorKind, int] = {
    "overloaded": 429,
    "cancelled": 503,
    "engine_error": 503,
    "timeout": 504,
}

RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds before which the same request is not worth another attempt.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: RETRY_AFTER,
    503: RETRY_AFTER,
}
"""For the OpenAPI schema: what a status comes with."""


class ErrorDetail(BaseModel):
    """`param` is the parameter at fault, `code` the reason for programs; null where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every status from 400 on carries, and an event in a stream that had begun."""

    error: ErrorDetail


class Failure(Exception):
    """A request that ends in an error instead of an answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or CODES.get(status)
        self.retry_after_s = 1.0 if status in (429, 503) else None
        """Seconds before which the same request is not worth another attempt."""

    @classmethod
    def of_engine(cls, exc: EngineOverloaded | EngineUnavailable) -> Failure:
        failure = cls(429 if isinstance(exc, EngineOverloaded) else 503, str(exc))
        failure.retry_after_s = exc.retry_after_s
        return failure

    @classmethod
    def of_row(cls, result: RowResult) -> Failure:
        """Of a result that has an `error_kind`."""
        kind = result.error_kind
        assert kind is not None
        code = "context_length_exceeded" if kind == "too_long" else kind
        if kind in PERMANENT_KINDS:
            return cls(400, result.error or kind, code=code)
        status = STATUS_OF_RETRYABLE[kind]
        return cls(status, result.error or kind, code=None if status == 429 else code)

    def body(self) -> ErrorBody:
        detail = ErrorDetail(
            message=as_error(str(self)), type=type_of(self.status), param=self.param, code=self.code
        )
        return ErrorBody(error=detail)

    def response(self, headers: dict[str, str] | None = None) -> Response:
        retry_after = {}
        if self.retry_after_s is not None:
            retry_after["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return Response(
            self.body().model_dump_json(),
            status_code=self.status,
            headers={**retry_after, **(headers or {})},
            media_type="application/json",
        )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that fails with these."""
    return {
        status: {"model": ErrorBody} | ({"headers": HEADERS[status]} if status in HEADERS else {})
        for status in statuses
    }


def type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_exceeded"
    return "server_error" if status >= 500 else "invalid_request_error"
