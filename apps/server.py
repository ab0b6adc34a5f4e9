"""Serves the app with uvicorn and says on standard output where: `{"port": n}`, once it takes requests.

Everything else that this process or its engine prints goes to standard error.

    python -m apps.server --port 8000
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys

import uvicorn

LAST_ANSWERS_S = 5
"""For answers on their way, once the app has drained (`apps.shutdown`)."""


class ReportingServer(uvicorn.Server):
    """Writes its port to the file descriptor `report` once it takes requests, and closes it."""

    def __init__(self, config: uvicorn.Config, report: int) -> None:
        super().__init__(config)
        self._report = report

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            port = sockets[0].getsockname()[1]
            os.write(self._report, json.dumps({"port": port}).encode() + b"\n")
            os.close(self._report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    options = parser.parse_args()
    report = os.dup(1)
    os.dup2(2, 1)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))
    config = uvicorn.Config(
        "apps.inference_app:app", access_log=False, timeout_graceful_shutdown=LAST_ANSWERS_S
    )
    server = ReportingServer(config, report)
    server.run(sockets=[listener])
    sys.exit(0 if server.started else 1)


if __name__ == "__main__":
    main()
