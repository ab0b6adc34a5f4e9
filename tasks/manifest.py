"""What a finished run says of itself: `manifest.json`, and the value that a driver returns."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from typing import Any

from pydantic import BaseModel


class Part(BaseModel):
    """One Parquet file of results; `path` is relative to the run's folder."""

    path: str
    rows: int
    sha256: str


class Manifest(BaseModel):
    """Always `rows_in = rows_ok + rows_failed`; truncated rows are among those that are ok."""

    rows_in: int
    rows_ok: int
    rows_failed: int
    rows_truncated: int
    """Completions that reached `max_tokens` (`finish_reason="length"`)."""
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    """From the first chunk handed out to the last result."""
    tokens_per_s: float
    """Completion tokens over `elapsed_s`."""
    model: str
    model_revision: str
    config_fingerprint: str
    """Digest of everything that decides the completions: model, sampling, system prompt, prompts."""
    versions: dict[str, str]
    parts: list[Part]
    rows_scored: int | None = None
    """Answered rows with a known answer; the accuracies are shares of these."""
    accuracy_strict: float | None = None
    accuracy_strict_95: tuple[float, float] | None = None
    """Wilson interval."""
    accuracy_flexible: float | None = None
    accuracy_flexible_95: tuple[float, float] | None = None
    output: str
    """The run's folder, as it was asked for."""


def fingerprint(config: dict[str, Any], prompts: str) -> str:
    """Of the model, how it is asked, and the digest of what it is asked."""
    return hashlib.sha256(json.dumps([config, prompts], sort_keys=True).encode()).hexdigest()


def versions(engine: str) -> dict[str, str]:
    """Of what took part on this side; `engine` is the app's own word, as `vllm 0.32.0`."""
    name, _, version = engine.partition(" ")
    packages = {name: importlib.metadata.version(name) for name in ("flyte", "datasets", "pyarrow")}
    return {name: version, **packages, "python": platform.python_version()}
