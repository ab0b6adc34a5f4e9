"""Routes that start and stop PyTorch's profiler in the engine, for a replica with `profiler_dir`.

`POST /start_profile` and `POST /stop_profile`, as vLLM's own server has them.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI, HTTPException


class Profiled(Protocol):
    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> None:
        """Returns once the traces are written."""


def add_profile_routes(app: FastAPI, engine: Profiled) -> None:
    """409 answers a start while a profile is being taken, and a stop while none is."""
    is_taken = False

    async def start_profile() -> None:
        nonlocal is_taken
        if is_taken:
            raise HTTPException(409, "a profile is being taken already")
        is_taken = True
        await engine.start_profile()

    async def stop_profile() -> None:
        nonlocal is_taken
        if not is_taken:
            raise HTTPException(409, "no profile is being taken")
        await engine.stop_profile()
        is_taken = False

    app.add_api_route("/start_profile", start_profile, methods=["POST"], status_code=204)
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"], status_code=204)
