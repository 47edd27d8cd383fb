"""What the pages tell a reader to type can be typed, and their code runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from cprop_lab.cli import app
from cprop_lab.experiments import EXPERIMENTS
from cprop_lab.registry import load
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "own_task.py"]


def commands(text):
    for line in re.findall(r"^\s*(?:entrypoint: )?(cprop-lab [a-z].*)$", text, flags=re.MULTILINE):
        yield line.partition("#")[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page):
    for line in commands(page.read_text()):
        name, *words = shlex.split(line)[1:]
        command = typer.main.get_command(app).commands[name]
        context = command.make_context(name, words)
        if name == "run":
            assert context.params["experiment"] in EXPERIMENTS


def test_there_are_commands_to_understand():
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 8


def losses(workload, optimizer="cprop-adam", **changes):
    training = Training(Specification(workload, optimizer, lr=1e-2, **changes).eager())
    first = training.evaluate()
    training.advance(150)
    return first, training.evaluate()


@pytest.mark.slow
def test_the_task_on_the_page_runs(tmp_path, monkeypatch):
    task, optimizer = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-task.md").read_text(), flags=re.DOTALL)
    (tmp_path / "task_of_the_page.py").write_text(task)
    (tmp_path / "optimizer_of_the_page.py").write_text(optimizer)
    monkeypatch.syspath_prepend(tmp_path)
    load(["optimizer_of_the_page"])
    for name in ("cprop-adam", "sign-sgd"):
        first, last = losses("task_of_the_page:MyTask", name)
        assert last["train_loss"] < 0.2 * first["train_loss"]


@pytest.mark.slow
def test_the_example_of_a_task_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    first, last = losses("own_task:Spirals")
    assert last["train_loss"] < first["train_loss"]
    assert last["accuracy"] > 0.4
    sys.modules.pop("own_task")
