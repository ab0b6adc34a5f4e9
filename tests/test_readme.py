"""The README's commands: local ones are run in a copy of the tree, cluster ones are parsed by the CLI."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apps.settings import AppSettings
from tests.conftest import ROOT
from tests.drivers import read_run

README = (ROOT / "README.md").read_text()
SERVED = "http://127.0.0.1:8000"


def commands(kind: str) -> list[str]:
    """The commands of all blocks marked `kind`, with continued lines joined."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


LOCAL, HUB, CLUSTER = commands("bash"), commands("bash hub"), commands("bash cluster")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would, beside this tree's environment."""
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty home, a replica without a model, any free port for `make serve`, and no outer make."""
    simulated = {"SATURATE_ENGINE": "simulated", "SATURATE_SIMULATED__TIME_SCALE": "0"}
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**outside, **simulated, "HOME": str(tmp_path), "PORT": "0"}


def test_local_commands_do_what_they_say(tree: Path, environment: dict[str, str]) -> None:
    server: subprocess.Popen[str] | None = None
    endpoint = SERVED
    try:
        for command in LOCAL:
            if command == "make serve":
                server = _serve(command, tree, environment)
                endpoint = _endpoint_of(server)
            elif command in ("make check", "make test"):
                _shell(f"make --dry-run {command.split()[1]}", tree, environment)
            else:
                _shell(command.replace(SERVED, endpoint), tree, environment)
    finally:
        if server is not None:
            os.killpg(server.pid, signal.SIGTERM)
            server.communicate(timeout=20)
    assert [read_run(tree / "runs" / name)[0].rows_ok for name in ("demo", "mine", "again")] == [500, 20, 100]


def _shell(command: str, tree: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, shell=True, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _serve(command: str, tree: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shlex.split(command),
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _endpoint_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    found = re.search(r"serving on (http://127.0.0.1:\d+)", server.stdout.readline())
    assert found
    return found[1]


@pytest.mark.parametrize("command", [*CLUSTER, *HUB])
def test_commands_for_elsewhere_are_known_to_the_cli(
    command: str, tree: Path, environment: dict[str, str]
) -> None:
    assert "Usage" in _shell(f"{command} --help", tree, environment)


def test_every_kind_of_command_is_there() -> None:
    assert {"make run", "make serve", "make check", "make test"} <= set(LOCAL)
    assert {shlex.split(command)[1] for command in CLUSTER} == {"create", "deploy", "run"}
    assert all("--local" in command for command in HUB)


def test_the_settings_table_lists_every_setting() -> None:
    documented = set(re.findall(r"^\| `SATURATE_(\w+)`", README, re.MULTILINE))
    fields = {name.upper() for name in AppSettings.model_fields if name != "simulated"}
    assert documented - {"SIMULATED__SEED"} == fields


def test_the_tree_names_every_module() -> None:
    drawn = README.partition("## The tree")[2].partition("## Run it on Flyte")[0]
    modules = [
        path.name for layer in ("apps", "tasks", "workflows") for path in (ROOT / layer).glob("[a-z]*.py")
    ]
    assert [name for name in modules if name not in drawn] == []
