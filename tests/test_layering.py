"""The tree is the architecture: imports point one way, and drivers load neither vLLM nor torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

LAYERS = ("apps", "tasks", "workflows")
HEAVY = ("vllm", "torch", "transformers")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Every module named in an import statement, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    above = LAYERS[LAYERS.index(layer) + 1 :]
    assert [name for name in imports_of(path) if name.split(".")[0] in above] == []


def test_no_import_cycles() -> None:
    known = {name_of(path) for path in MODULES}
    graph = {
        name_of(path): {name for name in imports_of(path) if name in known and name != name_of(path)}
        for path in MODULES
    }
    assert list(TopologicalSorter(graph).static_order())


def test_one_adapter_alone_imports_the_engine() -> None:
    importers = {
        name_of(path) for path in MODULES if {name.split(".")[0] for name in imports_of(path)} & set(HEAVY)
    }
    assert importers == {"apps.engines.vllm_args", "apps.engines.vllm_engine"}


def test_drivers_load_no_engine_and_no_openai() -> None:
    code = (
        "import sys, workflows.gsm8k, workflows.batch_inference;"
        f"print([name for name in {(*HEAVY, 'openai')} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
