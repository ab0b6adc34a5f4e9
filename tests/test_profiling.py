"""The routes of the profiler, around an engine that counts what it is asked."""

from __future__ import annotations

import httpx
from fastapi import FastAPI

from apps.profiling import add_profile_routes


class Counted:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start_profile(self) -> None:
        self.calls.append("start")

    async def stop_profile(self) -> None:
        self.calls.append("stop")


async def test_profiles_are_taken_one_at_a_time() -> None:
    app, engine = FastAPI(), Counted()
    add_profile_routes(app, engine)
    routes = ["/stop_profile", "/start_profile", "/start_profile", "/stop_profile", "/start_profile"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://app") as client:
        answers = [(await client.post(route)).status_code for route in routes]
    assert answers == [409, 204, 409, 204, 204]
    assert engine.calls == ["start", "stop", "start"]
