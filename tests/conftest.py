"""Fixtures that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import tenacity

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _backoff_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; a `Retry-After` is still waited for."""
    for wait in (tenacity.wait_random_exponential, tenacity.wait_exponential_jitter):
        monkeypatch.setattr(wait, "__call__", lambda self, retry_state: 0.0)
