"""What the app's log looks like: lines for people, or a JSON object a line for a collector of logs.

The app runs under uvicorn, started by `apps.server` or by Flyte, and each of them and vLLM has handlers
of its own. `log_lines` is entered by the app itself, which both ways of starting it have in common.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from tempfile import NamedTemporaryFile
from typing import Literal

LogFormat = Literal["plain", "json"]

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OURS = "apps"
OTHERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "flyte", "flyte.user")
"""Loggers with handlers or formats of their own in this process."""
VLLM_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
"""Variable that vLLM's processes read when they start: a file for `logging.config.dictConfig`."""


class JsonLines(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def log_lines(log_format: LogFormat, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Until it is left, everything is logged to standard error in this format, our own from INFO.

    Enter it before the engine starts. As plain lines, uvicorn, Flyte and vLLM keep their own formats.
    """
    root = logging.getLogger()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(PLAIN))
    with ExitStack() as undo:
        _replace(undo, root, [handler])
        ours = logging.getLogger(OURS)
        undo.callback(ours.setLevel, ours.level)
        ours.setLevel(logging.INFO)
        if log_format == "json":
            for logger in map(logging.getLogger, OTHERS):
                _replace(undo, logger, [])
                undo.callback(setattr, logger, "propagate", logger.propagate)
                logger.propagate = True
            undo.enter_context(_vllm_told(environ))
        yield


def _replace(undo: ExitStack, logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Takes out what writes to a stream; what somebody else listens with stays."""
    for former in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
        logger.removeHandler(former)
        undo.callback(logger.addHandler, former)
    for handler in handlers:
        logger.addHandler(handler)
        undo.callback(logger.removeHandler, handler)


@contextmanager
def _vllm_told(environ: MutableMapping[str, str]) -> Iterator[None]:
    """A file that the variable names already is left to say it."""
    if VLLM_CONFIG in environ:
        yield
        return
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{JsonLines.__module__}.{JsonLines.__name__}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"vllm": {"handlers": ["stderr"], "level": "INFO", "propagate": False}},
    }
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        environ[VLLM_CONFIG] = file.name
        try:
            yield
        finally:
            del environ[VLLM_CONFIG]
