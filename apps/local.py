"""The app on this machine, in a process group that ends with whoever started it (`apps.watchdog`).

python -m apps.local --port 8000      serves in the foreground until Ctrl-C
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from apps.errors import EngineUnavailable
from apps.settings import EMBEDDED_MODEL, PRESETS
from apps.watchdog import GRACE_S

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL_LINES = 15
"""Of an app's log in the error that it ended: enough for a traceback's end."""


def detect_accelerator() -> str:
    """The preset for the first NVIDIA GPU of this machine, or `cpu`; an unknown GPU counts as an L4."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return next((preset for preset in PRESETS if preset in names), "L4")


def app_environment(model: str) -> dict[str, str]:
    """This process's environment, completed for this machine; `model` wins over what the user has set."""
    chosen = model or os.environ.get("SATURATE_MODEL") or str(EMBEDDED_MODEL)
    return {
        "SATURATE_ACCELERATOR": detect_accelerator(),
        **os.environ,
        "SATURATE_MODEL": _name_model(chosen),
    }


def _name_model(model: str) -> str:
    """A Hub id as it is; a folder as a path from the repository's root, where the app runs."""
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        return model
    return str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)


class LocalApp:
    """A started app: where it listens, and when it ends. `log` is `None` if its output is not in a file."""

    def __init__(self, watchdog: asyncio.subprocess.Process, log: Path | None) -> None:
        self._watchdog = watchdog
        self._log = log

    async def wait_ready(self) -> str:
        """The endpoint, once the engine is loaded; raises `EngineUnavailable` if the app ends first."""
        assert self._watchdog.stdout is not None
        line = await self._watchdog.stdout.readline()
        if not line:
            raise EngineUnavailable(self._epitaph("did not start"))
        return f"http://127.0.0.1:{json.loads(line)['port']}"

    async def watch(self) -> None:
        """Never returns; raises `EngineUnavailable` when the app has ended."""
        await self._watchdog.wait()
        raise EngineUnavailable(self._epitaph("ended"))

    async def stop(self) -> None:
        """Leaves no process of the group behind, even if the watchdog itself was killed."""
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watchdog.wait(), 2 * GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watchdog.pid, signal.SIGKILL)
        await self._watchdog.wait()

    def _epitaph(self, what: str) -> str:
        if self._log is None:
            return f"the inference app {what}"
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"the inference app {what}; the end of {self._log}:", *lines])


@asynccontextmanager
async def local_app(model: str, log: Path | None = None, port: int = 0) -> AsyncIterator[LocalApp]:
    """Starts the app, with its output in `log` or on standard error; on leaving, its group has ended."""
    server = [sys.executable, "-m", "apps.server", "--port", str(port)]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        watchdog = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "apps.watchdog",
            *server,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
            env=app_environment(model),
        )
    app = LocalApp(watchdog, log)
    try:
        yield app
    finally:
        await app.stop()


async def _serve(model: str, port: int) -> None:
    async with local_app(model, port=port) as app:
        print(f"serving on {await app.wait_ready()}, Ctrl-C ends it", flush=True)
        await app.watch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    parser.add_argument("--model", default="", help="Hub id or folder; the embedded one by default")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options.model, options.port))
    except EngineUnavailable as exc:
        sys.exit(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
