"""SIGTERM: new work is refused with 503 while what is in the engine finishes, and then the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apps.admission import Admission

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Of the grace period, left for the last answers to reach their callers."""


@asynccontextmanager
async def drain_on_sigterm(admission: Admission, grace_s: float) -> AsyncIterator[None]:
    """Puts the drain before the server's own handler of SIGTERM, which closes the socket at once.

    The server's handler runs when nothing is left to finish, and after `grace_s` in any case: what is
    still in the engine then is answered as `cancelled`. A second SIGTERM does not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    servers_own = signal.getsignal(signal.SIGTERM)
    draining: asyncio.Task[None] | None = None

    def start_or_end() -> None:
        nonlocal draining
        if draining is None:
            draining = loop.create_task(drain())
        else:
            end()

    def end() -> None:
        signal.signal(signal.SIGTERM, servers_own)
        signal.raise_signal(signal.SIGTERM)

    async def drain() -> None:
        admission.drain()
        try:
            async with asyncio.timeout(max(grace_s - ANSWER_S, 0)):
                await admission.wait_idle()
        except TimeoutError:
            logger.warning("%d rows are unfinished at the end of the grace period", admission.rows)
            admission.cancel_all()
        end()

    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(start_or_end))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, servers_own)
        if draining is not None:
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
