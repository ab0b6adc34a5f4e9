"""Ends a process group when its starter is gone, or when its main process is.

    python -m apps.watchdog COMMAND ...

Started as the leader of a session of its own, with a pipe from the starter as standard input. When the
starter dies, however it dies, the pipe closes; when the command exits, `wait` returns. Either way the
whole group ends: vLLM's engine processes outlive a killed parent otherwise. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
"""Seconds between asking the command to end and killing the group."""


def main() -> None:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    threading.Thread(target=_end_with_starter, args=(command,), daemon=True).start()
    command.wait()
    _kill_group()


def _end_with_starter(command: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    command.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(GRACE_S)
    _kill_group()


def _kill_group() -> None:
    """Ends this process, too: it leads the group."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
