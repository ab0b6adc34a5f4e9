"""Settings and engines for tests of the app: simulated ones, and some that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from apps.engines.base import Completion, RenderedPrompt
from apps.engines.simulated import SimulatedEngine
from apps.schema import GenerateRequest, RawRow, Row, SamplingParams
from apps.settings import AppSettings


def make_settings(**overrides: Any) -> AppSettings:
    """A small simulated replica that answers at once; `simulated` overrides go into its settings."""
    simulated = {"time_scale": 0.0, **overrides.pop("simulated", {})}
    fields = {"engine": "simulated", "model": "sim", "max_num_seqs": 4, **overrides}
    return AppSettings.model_validate({**fields, "simulated": simulated})


def make_row(row_id: str = "0", prompt: Any = "What is 2 + 2?", **fields: Any) -> RawRow:
    return RawRow.model_validate({"id": row_id, "prompt": prompt, **fields})


def make_body(num_rows: int = 1, **fields: Any) -> dict[str, Any]:
    """A body of `/generate` with rows `0`, `1`, …"""
    rows = [{"id": str(number), "prompt": f"Question {number}?"} for number in range(num_rows)]
    body = {"rows": rows, **fields}
    GenerateRequest.model_validate(body)
    return body


class HeldEngine(SimulatedEngine):
    """Keeps every prompt until `release` is set, and counts what it holds and what was aborted."""

    def __init__(self, settings: AppSettings) -> None:
        super().__init__(settings)
        self.release = asyncio.Event()
        self.held = 0
        self.most_held = 0
        self.aborted = 0

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.held -= 1
        return await super().generate(prompt, sampling, priority=priority, on_text=on_text)


class FaultyEngine(SimulatedEngine):
    """Raises `fault` for prompts that hold the word `poison`, when rendering or when generating."""

    def __init__(self, settings: AppSettings, fault: BaseException, in_render: bool = False) -> None:
        super().__init__(settings)
        self._fault = fault
        self._in_render = in_render

    async def render(self, row: Row) -> RenderedPrompt:
        if self._in_render and "poison" in str(row.prompt):
            raise self._fault
        return await super().render(row)

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        if not self._in_render and "poison" in str(prompt.payload):
            raise self._fault
        return await super().generate(prompt, sampling, priority=priority, on_text=on_text)


async def until(condition: Any) -> None:
    """Waits until `condition()` holds; the test's time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110  # the condition may be of anything, so nothing can set an event
        await asyncio.sleep(0.001)
