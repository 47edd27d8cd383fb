"""The laboratory is laid out by stages: imports go one way, and reading results needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

LAB = Path(__file__).parents[1] / "src" / "cprop_lab"

BASE = {"source", "registry"}

# What each stage may import, besides itself and the base; docs/internals.md shows the same picture.
BELOW = {
    "source": set(),
    "registry": {"source"},
    "models": set(),
    "workloads": {"models"},
    "run": {"workloads", "models"},
    "store": {"run"},
    "analysis": {"store", "run"},
    "engine": {"store", "run", "workloads"},
    "output": {"analysis", "store", "run"},
    "experiments": {"engine", "analysis", "store", "run"},
    "cli": {"experiments", "engine", "output", "analysis", "store", "run", "workloads"},
    "__main__": {"cli"},
    "__init__": {"experiments", "run", "workloads"},  # the public names
}


def stage(path):
    return path.relative_to(LAB).parts[0].removesuffix(".py")


def imported(path):
    """The stages a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            # `from cprop_lab import workloads` names a stage; so does `from cprop_lab.run import names`.
            whole = node.module == "cprop_lab"
            modules = [f"cprop_lab.{alias.name}" for alias in node.names] if whole else [node.module]
        for module in modules:
            package, _, rest = module.partition(".")
            if package == "cprop_lab":
                yield rest.partition(".")[0] or "__init__", node.lineno


FILES = sorted(LAB.rglob("*.py"))


def test_every_file_belongs_to_a_stage():
    assert {stage(path) for path in FILES} == set(BELOW)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LAB)))
def test_imports_go_one_way(path):
    own = stage(path)
    backwards = [
        f"{path.relative_to(LAB)}, line {line}: {own} imports {other}, which is not below it"
        for other, line in imported(path)
        if other != own and other not in BELOW[own] | (set() if own in BASE else BASE)
    ]
    assert not backwards, "\n".join(backwards)


def test_the_stages_have_an_order():
    order = list(BELOW)
    assert all(order.index(below) < order.index(own) for own, all_below in BELOW.items() for below in all_below)


READING = """
import sys
from cprop_lab.cli import app

store, page = sys.argv[1:]
for command in (["list"], ["plot", "--storage", store], ["report", "--storage", store, "--out", page]):
    app(command, standalone_mode=False)
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_results_are_listed_drawn_and_reported_without_torch(tmp_path):
    run = Specification("fmnist-fc", "cprop-adam", lr=1e-3)
    store = Store(tmp_path / "store")
    store.write(run, "finished", [{"step": step, "train_loss": 0.5, "lr": 1e-3} for step in (0, 500)], {})
    manifest = EXPERIMENTS["fmnist-fc"].run(PRESETS["smoke"], lambda specifications: [])
    store.write_experiment("fmnist-fc-smoke", {**manifest, "runs": [run_id(run)], "command": "cprop-lab run fmnist-fc"})
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", READING, str(tmp_path / "store"), str(page)]
    told = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    assert "Figure: " in told
    assert "page-runs/fmnist-fc-smoke.csv" in page.read_text()
    assert run_id(run) in (tmp_path / "page-runs" / "fmnist-fc-smoke.csv").read_text()
