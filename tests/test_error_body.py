"""Errors over HTTP: what clients and programs go by."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from apps.error_body import Failure
from apps.errors import PERMANENT_KINDS, EngineOverloaded, EngineUnavailable, ErrorKind
from apps.schema import RowResult


def test_a_body_has_the_four_fields_of_openai() -> None:
    response = Failure(400, "no such thing", param="thing").response()
    expected = {"message": "no such thing", "type": "invalid_request_error", "param": "thing", "code": None}
    assert json.loads(bytes(response.body)) == {"error": expected}
    assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("status", "kind", "waits"),
    [
        (401, "invalid_request_error", False),
        (408, "invalid_request_error", False),
        (413, "invalid_request_error", False),
        (429, "rate_limit_exceeded", True),
        (500, "server_error", False),
        (502, "server_error", False),
        (503, "server_error", True),
        (504, "server_error", False),
    ],
)
def test_a_status_decides_type_and_retry(status: int, kind: str, waits: bool) -> None:
    failure = Failure(status, "")
    assert failure.body().error.type == kind
    assert ("Retry-After" in failure.response().headers) == waits


def test_every_failed_row_has_a_status() -> None:
    statuses = {
        kind: Failure.of_row(RowResult.failed("0", kind, "because")).status for kind in get_args(ErrorKind)
    }
    assert {statuses.pop(kind) for kind in PERMANENT_KINDS} == {400}
    assert statuses == {"overloaded": 429, "cancelled": 503, "engine_error": 503, "timeout": 504}


def test_a_prompt_beyond_the_context_has_the_code_of_openai() -> None:
    failure = Failure.of_row(RowResult.failed("0", "too_long", "too long"))
    assert failure.code == "context_length_exceeded"


def test_a_refusal_of_the_engine_says_when_to_come_back() -> None:
    full = Failure.of_engine(EngineOverloaded("full", retry_after_s=2.1)).response()
    dead = Failure.of_engine(EngineUnavailable("dead", retry_after_s=30.0)).response()
    assert (full.status_code, full.headers["Retry-After"]) == (429, "3")
    assert (dead.status_code, dead.headers["Retry-After"]) == (503, "30")


def test_a_message_is_short_and_can_be_sent() -> None:
    body = Failure(400, "\ud800" + "x" * 10_000).body()
    assert len(body.error.message) < 300
    assert json.loads(body.model_dump_json())["error"]["message"].startswith("\\ud800")
