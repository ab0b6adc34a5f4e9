"""A Hugging Face Hub of our own on a loopback port: data sets only, read only, one revision each.

The Hub client is then tested as it is, retries included: faults are answered by the server and every
request is logged.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response

ROWS = [
    {
        "question": f"A crate holds {n + 3} pears. How many pears are in {n + 2} crates?",
        "answer": f"{n + 2} x {n + 3} = {(n + 2) * (n + 3)}\n#### {(n + 2) * (n + 3)}",
    }
    for n in range(20)
]
"""Shaped as GSM8K."""

CARD = """\
---
configs:
- config_name: main
  data_files:
  - split: test
    path: main/test-*
---
"""
FOREVER = sys.maxsize
CUT_SHORT = 0
"""Status of a fault: the answer begins, and then the connection ends."""


class LoggedRequest(NamedTuple):
    method: str
    path: str
    status: int


def is_in(pattern: str, path: str) -> bool:
    """Whether `pattern` is a part of `path`; `*` stands for anything."""
    return fnmatch(path, f"*{pattern}*")


@dataclass
class Fault:
    """What the next `times` matching requests are answered instead."""

    path: str
    status: int
    method: str
    times: int
    retry_after: str

    def matches(self, request: Request) -> bool:
        is_meant = is_in(self.path, request.url.path) and self.method in ("", request.method)
        return self.times > 0 and is_meant

    def answer(self) -> Response:
        self.times -= 1
        if self.status == CUT_SHORT:
            return Response(headers={"Content-Length": "1000"})
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        return Response(status_code=self.status, headers=headers)


class HubStandIn:
    """Serves `root/<owner>/<name>/` as the data set `<owner>/<name>`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = ""
        self.requests: list[LoggedRequest] = []
        self._faults: list[Fault] = []

    def add_dataset(self, name: str) -> Path:
        """`ROWS` as configuration `main`, split `test`; returns its Parquet file."""
        folder = self.root / name / "main"
        folder.mkdir(parents=True)
        (folder.parent / "README.md").write_text(CARD)
        path = folder / "test-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path)
        return path

    def fail(
        self, path: str, status: int, *, method: str = "", times: int = 1, retry_after: str = ""
    ) -> None:
        """The next `times` requests with `path` in theirs, of `method` if one is given, get `status`."""
        self._faults.append(Fault(path, status, method, times, retry_after))

    def statuses(self, path: str, method: str = "GET") -> list[int]:
        """Of the requests with `path` in theirs, in their order."""
        return [
            request.status
            for request in self.requests
            if is_in(path, request.path) and request.method == method
        ]

    async def answer(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        fault = next((fault for fault in self._faults if fault.matches(request)), None)
        response = fault.answer() if fault else await call_next(request)
        status = fault.status if fault else response.status_code
        self.requests.append(LoggedRequest(request.method, request.url.path, status))
        return response


@contextmanager
def serve_hub(root: Path) -> Iterator[HubStandIn]:
    """A running stand-in; connections wait in the listener's backlog until the server takes them."""
    hub = HubStandIn(root)
    app = FastAPI()
    app.middleware("http")(hub.answer)
    _add_routes(app, root)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield hub
        finally:
            server.should_exit = True
            thread.join()


def _add_routes(app: FastAPI, root: Path) -> None:
    def find(owner: str, name: str, revision: str) -> Path:
        folder = root / owner / name
        if not folder.is_dir():
            raise HTTPException(404, headers={"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", _commit(folder)):
            raise HTTPException(404, headers={"X-Error-Code": "RevisionNotFound"})
        return folder

    @app.get("/api/datasets/{owner}/{name}")
    @app.get("/api/datasets/{owner}/{name}/revision/{revision}")
    def describe(owner: str, name: str, revision: str = "main") -> dict[str, Any]:
        folder = find(owner, name, revision)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {
            "id": f"{owner}/{name}",
            "sha": _commit(folder),
            "siblings": [{"rfilename": path.relative_to(folder).as_posix()} for path in files],
        }

    @app.get("/api/datasets/{owner}/{name}/tree/{revision}")
    @app.get("/api/datasets/{owner}/{name}/tree/{revision}/{path:path}")
    def list_folder(owner: str, name: str, revision: str, path: str = "") -> list[dict[str, Any]]:
        folder = find(owner, name, revision)
        if not (folder / path).is_dir():
            raise HTTPException(404, headers={"X-Error-Code": "EntryNotFound"})
        return [_describe_entry(folder, entry) for entry in sorted((folder / path).iterdir())]

    @app.api_route("/datasets/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def download(owner: str, name: str, revision: str, path: str) -> FileResponse:
        folder = find(owner, name, revision)
        headers = {"X-Repo-Commit": _commit(folder)}
        file = folder / path
        if not file.is_file():
            raise HTTPException(404, headers={"X-Error-Code": "EntryNotFound", **headers})
        return FileResponse(file, headers={"ETag": f'"{_digest(file.read_bytes())}"', **headers})


def _describe_entry(folder: Path, entry: Path) -> dict[str, Any]:
    path = entry.relative_to(folder).as_posix()
    if entry.is_dir():
        return {"type": "directory", "oid": _digest(path.encode()), "size": 0, "path": path}
    content = entry.read_bytes()
    return {"type": "file", "oid": _digest(content), "size": len(content), "path": path}


def _commit(folder: Path) -> str:
    """The name of the one revision that a data set has."""
    return _digest(folder.relative_to(folder.parents[1]).as_posix().encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:40]
