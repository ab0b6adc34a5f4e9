"""Looking at process groups, and making sure that a test leaves none behind."""

from __future__ import annotations

import asyncio
import os

import psutil

PROMISED_S = 10.0
"""No process of an app or its driver is left after this long."""


def group_of(pid: int) -> list[psutil.Process]:
    """The living processes whose group is led by `pid`."""
    return [process for process in psutil.process_iter() if _group(process) == pid]


def _group(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def server_of(group: list[psutil.Process]) -> psutil.Process:
    (server,) = (process for process in group if process.cmdline()[1:3] == ["-m", "apps.server"])
    return server


def watchdog_of(starter: int) -> psutil.Process:
    (watchdog,) = (
        process
        for process in psutil.Process(starter).children()
        if process.cmdline()[1:3] == ["-m", "apps.watchdog"]
    )
    return watchdog


async def ended(pid: int) -> bool:
    """Whether the group led by `pid` ends within the promised time."""
    for _ in range(int(PROMISED_S / 0.1)):
        if not group_of(pid):
            return True
        await asyncio.sleep(0.1)
    return False
