"""The HTTP client of the app: what httpx and the status codes mean is decided here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx
import tenacity
from pydantic import SecretStr, TypeAdapter, ValidationError

from apps.errors import (
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    RequestRefused,
    RequestTooLarge,
)
from apps.schema import NDJSON, Done, Heartbeat, ModelCard, ModelList, RowResult

logger = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_TIMEOUT_S = 3600.0
"""As long as the platform lets a request live: one that wakes a replica waits for the model, too."""
MAX_SILENCE_S = 60.0
"""On a stream, where the app sends a heartbeat every few seconds."""
MAX_WAIT_S = 30.0
"""Longest pause between two attempts."""
PATIENCE_S = 1800.0
"""How long an app on a cluster may take to start, or to have room: longer than a cold start."""
LOCAL_PATIENCE_S = 60.0
"""How long an app on this machine may be out of reach; one that is only full is given `PATIENCE_S`."""


class InferenceClient:
    """One connection pool to one app; an async context manager.

    Each method is one attempt. They raise `RequestRefused` for what no repetition will change, and
    `EngineTimeout`, `EngineOverloaded` or `EngineUnavailable` for what a later one may; `patiently` repeats.
    """

    def __init__(
        self,
        endpoint: str,
        token: SecretStr | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.num_lines = 0
        """Lines heard on all streams, heartbeats included: signs of life."""
        self._http = httpx.AsyncClient(
            base_url=endpoint,
            headers={"Authorization": f"Bearer {token.get_secret_value()}"} if token else {},
            transport=transport,
            timeout=httpx.Timeout(60.0, read=REQUEST_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._http.__aexit__(*exc_info)

    async def served_model(self) -> ModelCard:
        """Waits for a replica that is scaled to zero, as long as the platform holds the request."""
        async with self._stream("GET", "/v1/models") as response:
            cards = _parse(MODELS, await response.aread()).data
        if len(cards) != 1:
            raise EngineError(f"the app serves {len(cards)} models instead of one")
        return cards[0]

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[RowResult, None]:
        """`body` as `GenerateRequest`; each result as its row finishes, every row once.

        What was yielded before an error stays good: only the other rows are left to ask for.
        """
        left = {row["id"] for row in body["rows"]}
        try:
            async with self._stream("POST", "/generate", json=body, headers={"Accept": NDJSON}) as response:
                async for line in _lines(response):
                    self.num_lines += 1
                    if isinstance(line, RowResult):
                        if line.id not in left:
                            raise EngineError(f"the app answered row {line.id!r}, which was not asked for")
                        left.remove(line.id)
                        yield line
        except (EngineUnavailable, EngineTimeout):
            if left:
                raise
        if left:
            raise EngineUnavailable(f"the answer broke off with {len(left)} rows to come")

    @asynccontextmanager
    async def _stream(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """A successful answer whose body is still to be read; maps what httpx raises until it is."""
        try:
            async with self._http.stream(method, path, **options) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of_status(response)
                yield response
        except (httpx.TimeoutException, TimeoutError) as exc:
            raise EngineTimeout(f"{method} {path}: {exc!r}") from exc
        except httpx.RequestError as exc:
            raise EngineUnavailable(f"{method} {path}: {exc!r}") from exc


async def _lines(response: httpx.Response) -> AsyncIterator[RowResult | Heartbeat | Done]:
    """What stands between newline bytes; `httpx.aiter_lines` also splits inside of answers.

    The torn end of a broken stream, after the last newline, is dropped. Raises `TimeoutError` if
    nothing comes for `MAX_SILENCE_S`, heartbeats included.
    """
    chunks = response.aiter_bytes()
    buffer = b""
    while True:
        async with asyncio.timeout(MAX_SILENCE_S):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            yield _parse(LINE, line)


def is_endpoint(url: str) -> bool:
    """Whether `url` is something that a client can be made for."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and parsed.host != "" and (parsed.port or 80) < 2**16


def error_of_status(response: httpx.Response) -> EngineError | RequestRefused:
    """408, 429 and every 5xx may pass; any other status is final, though 413 is about the size alone."""
    message = f"{response.status_code} from {response.url}: {response.text[:500]}"
    after = response.headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdecimal() else 1.0
    if response.status_code == 429:
        return EngineOverloaded(message, retry_after_s)
    if response.status_code in (408, 504):
        return EngineTimeout(message)
    if response.status_code >= 500:
        return EngineUnavailable(message, retry_after_s)
    return RequestTooLarge(message) if response.status_code == 413 else RequestRefused(message)


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Repeats `call` while it raises `EngineError`; the last one leaves after `patience_s` seconds.

    The wait grows with jitter, and is never shorter than a `Retry-After`. An app that answers that it
    is full is alive, and is asked for `PATIENCE_S` at least.
    """

    def is_enough(state: tenacity.RetryCallState) -> bool:
        is_full = state.outcome is not None and isinstance(state.outcome.exception(), EngineOverloaded)
        return tenacity.stop_before_delay(max(PATIENCE_S, patience_s) if is_full else patience_s)(state)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(EngineError),
        stop=is_enough,
        wait=_wait_s,
        before_sleep=_log_wait,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError("tenacity raises the last error")


_backoff = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S)
_jitter = tenacity.wait_random(0, 1)


def _wait_s(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return getattr(error, "retry_after_s", 0.0) * (1 + 0.5 * _jitter(state)) + _backoff(state)


def _log_wait(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    logger.warning("asking again in %.0f s: %s", state.upcoming_sleep, error)


LINE: TypeAdapter[RowResult | Heartbeat | Done] = TypeAdapter(RowResult | Heartbeat | Done)
MODELS: TypeAdapter[ModelList] = TypeAdapter(ModelList)


def _parse(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as exc:
        raise EngineError(f"not an answer of the inference app: {body[:80]!r}") from exc
