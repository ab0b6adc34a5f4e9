"""Log lines, beside those of the servers that the app runs under."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from apps.logs import VLLM_CONFIG, JsonLines, LogFormat, log_lines
from tests.conftest import ROOT

logger = logging.getLogger("apps.test")

UNDER_UVICORN = """
import logging, os, sys, flyte, uvicorn
from flyte._logging import initialize_logger
from apps.logs import log_lines

initialize_logger(reset_root_logger=sys.argv[1] == "reset")
uvicorn.Config("apps.inference_app:app")
with log_lines("json", os.environ):
    for name in ("uvicorn.error", "uvicorn.access", "flyte", "flyte.user", "apps.test", "elsewhere"):
        logging.getLogger(name).error('of %s in "quotes"', name)
"""

AS_VLLM = """
import json, logging.config, sys
from pathlib import Path
logging.config.dictConfig(json.loads(Path(sys.argv[1]).read_text()))
logging.getLogger("vllm.engine").info("ready")
"""


def run(code: str, argument: str) -> list[dict[str, str]]:
    """The lines of standard error, each of which must be an object."""
    done = subprocess.run(
        [sys.executable, "-c", code, argument], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("flyte_root", ["reset", "left"])
def test_every_logger_writes_one_object_once(flyte_root: str) -> None:
    lines = run(UNDER_UVICORN, flyte_root)
    names = ["uvicorn.error", "uvicorn.access", "flyte", "flyte.user", "apps.test", "elsewhere"]
    assert [line["logger"] for line in lines] == names
    assert [line["message"] for line in lines] == [f'of {name} in "quotes"' for name in names]


def test_vllm_is_told_to_do_the_same() -> None:
    environ: dict[str, str] = {}
    with log_lines("json", environ):
        lines = run(AS_VLLM, environ[VLLM_CONFIG])
        file = Path(environ[VLLM_CONFIG])
    assert [(line["logger"], line["message"]) for line in lines] == [("vllm.engine", "ready")]
    assert environ == {}
    assert not file.exists()


def test_a_given_file_for_vllm_stays() -> None:
    environ = {VLLM_CONFIG: "/etc/vllm.json"}
    with log_lines("json", environ):
        assert environ == {VLLM_CONFIG: "/etc/vllm.json"}
    assert environ == {VLLM_CONFIG: "/etc/vllm.json"}


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines("json", {}):
        try:
            raise ValueError("lone \ud800 surrogate\nand a second line")
        except ValueError:
            logger.exception("a row failed")
    (line,) = capsys.readouterr().err.splitlines()
    written = json.loads(line)
    assert list(written) == ["time", "level", "logger", "message", "exception"]
    assert (written["level"], written["message"]) == ("ERROR", "a row failed")
    assert written["exception"].endswith("ValueError: lone \ud800 surrogate\nand a second line")


def test_times_are_in_utc() -> None:
    record = logging.LogRecord("apps.test", logging.INFO, "", 0, "%d rows", (3,), None)
    record.created = 0.25
    assert json.loads(JsonLines().format(record)) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "INFO",
        "logger": "apps.test",
        "message": "3 rows",
    }


def test_plain_lines_name_time_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines("plain", {}):
        logger.info("%d rows", 3)
        logging.getLogger("elsewhere").info("not ours")
    assert capsys.readouterr().err.partition(" INFO ")[2] == "apps.test: 3 rows\n"


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_leaving_gives_everything_back(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    of_uvicorn = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [of_uvicorn])
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", False)
    before = state()
    with log_lines(log_format, {}):
        assert state() != before
        assert (of_uvicorn in logging.getLogger("uvicorn").handlers) == (log_format == "plain")
    assert state() == before


def state() -> list[tuple[set[logging.Handler], int, bool]]:
    loggers = map(logging.getLogger, ("", "apps", "uvicorn", "flyte", "flyte.user"))
    return [(set(logger.handlers), logger.level, logger.propagate) for logger in loggers]
