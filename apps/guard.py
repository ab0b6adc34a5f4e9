"""What a request must pass before the app looks at it: the bearer token, and limits on its body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from fastapi import Depends, HTTPException
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apps.error_body import Failure
from apps.settings import AppSettings

BEARER = Depends(HTTPBearer(auto_error=False, description="Needed where the app has an `api_token`."))
"""Puts the scheme into the OpenAPI schema of a route. It is `Guard` that checks the token."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes of a platform carry no token."""
BODY_TIMEOUT_S = 60.0
"""Longest pause between two pieces of a body."""
UNAUTHORIZED = Failure(401, "a valid bearer token is required").response({"WWW-Authenticate": "Bearer"})
DISCARD_FACTOR = 8
"""How many times too long a body may be for its client to learn that it was too long."""
CLOSE = {"Connection": "close"}
"""Where the rest of a body may not be read."""


class Guard:
    """ASGI middleware. Refuses with 401, 408, 413 and 429.

    The bytes of a body count as open until its request is answered, so that all bodies together stay
    within `max_open_bytes`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        settings: AppSettings = scope["app"].state.settings
        num_bytes = 0
        is_whole = False

        async def guarded() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"no more of the body came in {BODY_TIMEOUT_S:.0f} s", CLOSE
                ) from None
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            self._open_bytes += len(message.get("body", b""))
            if num_bytes > settings.max_request_bytes:
                await discard(receive, message, DISCARD_FACTOR * settings.max_request_bytes)
                raise HTTPException(413, f"the body exceeds {settings.max_request_bytes} bytes", CLOSE)
            if self._open_bytes > settings.max_open_bytes:
                await discard(receive, message, settings.max_request_bytes)
                error = f"open requests hold {settings.max_open_bytes} bytes"
                raise HTTPException(429, error, {**CLOSE, "Retry-After": "1"})
            return message

        if not is_authorized(settings, scope["path"], Headers(scope=scope).get("Authorization", "")):
            return await UNAUTHORIZED(scope, receive, send)
        try:
            await self._app(scope, guarded, send)
        finally:
            self._open_bytes -= num_bytes


async def discard(receive: Receive, message: Message, max_bytes: int) -> None:
    """The rest of a body: a client that is still sending when its connection closes sees no answer."""
    with contextlib.suppress(TimeoutError):
        while message.get("more_body", False) and max_bytes > 0:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await receive()
            max_bytes -= len(message.get("body", b""))


def is_authorized(settings: AppSettings, path: str, authorization: str) -> bool:
    if settings.api_token is None or path in OPEN_PATHS:
        return True
    expected = f"Bearer {settings.api_token.get_secret_value()}"
    return hmac.compare_digest(authorization.encode(), expected.encode())
