"""The app that a driver talks to: the deployed one, one that it is told of, or one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from apps.errors import JobError
from apps.inference_app import app_env
from apps.local import LocalApp, local_app
from apps.schema import ModelCard
from apps.settings import AppSettings
from tasks.client import LOCAL_PATIENCE_S, PATIENCE_S, InferenceClient, patiently
from tasks.progress import waiting

T = TypeVar("T")


@dataclass(frozen=True)
class ServingApp:
    """An app that takes requests, and what it serves."""

    endpoint: str
    card: ModelCard
    started_here: LocalApp | None = None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`; if an app started here ends first, cancels it and raises `EngineUnavailable`."""
        if self.started_here is None:
            return await work
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self.started_here.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await watching
            return await working
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


@asynccontextmanager
async def deployed_app(
    endpoint: str, model: str, is_local: bool, console: Console
) -> AsyncIterator[ServingApp]:
    """The app at `endpoint`, by default the deployed one; waits for it to start from zero."""
    endpoint = endpoint or app_env.endpoint
    with waiting(console, f"waiting for the inference app at {endpoint}"):
        card = await _served_model(endpoint, LOCAL_PATIENCE_S if is_local else PATIENCE_S)
    if model not in ("", card.id):
        raise JobError("model", model, f"the app at {endpoint} serves {card.id!r}")
    yield ServingApp(endpoint, card)


@asynccontextmanager
async def app_of_our_own(model: str, log: Path, console: Console) -> AsyncIterator[ServingApp]:
    """An app on this machine that ends with this process; `model` as in `apps.local.local_app`."""
    async with local_app(model, log) as app:
        with waiting(console, f"starting the engine, its log is {log}"):
            endpoint = await app.wait_ready()
            card = await _served_model(endpoint, LOCAL_PATIENCE_S)
        yield ServingApp(endpoint, card, started_here=app)


async def _served_model(endpoint: str, patience_s: float) -> ModelCard:
    async with InferenceClient(endpoint, AppSettings().api_token) as client:
        return await patiently(client.served_model, patience_s)
