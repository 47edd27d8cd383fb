"""Optimizers and measures of one's own: registered by name, part of a run's id, and known to the workers."""

import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from test_cli import lab

from cprop_lab import Recipe, Specification, register_measure, register_optimizer, source, workloads
from cprop_lab.engine.check import TaskError, check, trimmed
from cprop_lab.registry import load
from cprop_lab.run import optimizers
from cprop_lab.run.identity import resolve, run_id
from cprop_lab.run.measures import OWN
from cprop_lab.run.names import parse
from cprop_lab.run.recipes import RECIPES
from cprop_lab.store import Store

__all__ = ["lab"]  # a fixture

MODULE = """
    import torch
    from cprop_lab import Recipe, register_measure, register_optimizer
    from signs import sign

    class SignSGD(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, momentum=0.9):
            super().__init__(params, {"lr": lr, "momentum": momentum})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["momentum"])
                    p.sub_(sign(mean), alpha=group["lr"])

    def certain(moments):
        return torch.ones_like(moments.m)

    register_optimizer("mine", Recipe("Mine", SignSGD, settings={"momentum": 0.9}, guess=1e-2))
    register_optimizer("mine-alone", Recipe("Mine alone", SignSGD, settings={"momentum": 0.9}, alone=True))
    register_optimizer("pinned", Recipe("Pinned", SignSGD), version="1")
    register_measure("certain", certain)
"""
RUN = Specification("fmnist-fc", "mine", lr=1e-2)


def write(folder):
    (folder / "mine_too.py").write_text(textwrap.dedent(MODULE))
    (folder / "signs.py").write_text("def sign(x):\n    return x.sign()\n")


def forget():
    """As in a new process."""
    for known in (sys.modules, source._imported.modules, source._read):
        for name in [name for name in known if name in ("mine_too", "signs")]:
            del known[name]
    for table in (RECIPES, OWN):
        for name in [name for name in table._codes if name.startswith(("mine", "pinned", "certain"))]:
            del table._added[name], table._codes[name]
    parse.cache_clear()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    load(["mine_too"])
    yield tmp_path
    forget()


def test_it_is_built_with_its_settings_and_with_cprop_around_it(mine):
    model = torch.nn.Linear(2, 2)
    plain, _ = optimizers.build(RUN.replace(settings={"momentum": 0.5}), model)
    assert type(plain).__name__ == "SignSGD"
    assert (plain.param_groups[0]["lr"], plain.param_groups[0]["momentum"]) == (1e-2, 0.5)
    settings = {"cprop_c": 2.0, "cprop_measure": "certain", "cprop_fused": False}
    scaled, _ = optimizers.build(RUN.replace(optimizer="cprop-mine", settings=settings), model)
    assert scaled.param_groups[0]["cprop_c"] == 2.0
    wrapped = RUN.replace(optimizer="cprop-mine+cosine", settings={"momentum": 0.5})
    assert wrapped.label == "CProp(Mine), momentum = 0.5, cosine"
    with pytest.raises(ValueError, match="CProp cannot wrap mine-alone"):
        _ = RUN.replace(optimizer="cprop-mine-alone").optimizer_name


def test_its_source_is_part_of_its_runs_ids_and_of_no_others(mine):
    runs = {
        "mine": RUN,
        "wrapped": RUN.replace(optimizer="cprop-mine"),
        "measured": RUN.replace(optimizer="cprop-adam", settings={"cprop_measure": "certain"}),
        "pinned": RUN.replace(optimizer="pinned"),
        "adam": RUN.replace(optimizer="adam"),
    }
    before = {name: run_id(run) for name, run in runs.items()}
    assert resolve(RUN)["with"] == {"mine": source.digest("mine_too")}
    assert resolve(runs["pinned"])["with"] == {"pinned": "1"}
    assert "with" not in resolve(runs["adam"])
    forget()
    (mine / "signs.py").write_text("def sign(x):\n    return x.sign() * 2\n")  # a module that it imports
    load(["mine_too"])
    after = {name: run_id(run) for name, run in runs.items()}
    assert {name for name in runs if before[name] != after[name]} == {"mine", "wrapped", "measured"}


def test_a_stored_run_says_which_code_it_was(mine):
    store = Store(mine / "store")
    store.write(RUN, "finished", [{"step": 0, "train_loss": 1.0}], {})
    (run,) = store.runs()
    assert run.specification.replace(settings={}) == RUN
    assert store.check(mend=False) == []


ELSEWHERE = """
import pickle, sys
from cprop_lab import Specification, source
from cprop_lab.registry import load
from cprop_lab.run.identity import run_id

sources = pickle.load(sys.stdin.buffer)
source.adopt(sources)
load(sources)
print(run_id(Specification("fmnist-fc", "mine", lr=1e-2)))
"""


@pytest.mark.slow
def test_another_process_needs_none_of_the_files(mine, tmp_path_factory):
    shipped = pickle.dumps(workloads.sources(["fmnist-fc"]))
    elsewhere = [sys.executable, "-c", ELSEWHERE]
    said = subprocess.check_output(elsewhere, input=shipped, cwd=tmp_path_factory.mktemp("elsewhere"), timeout=500)
    assert said.decode().strip() == run_id(RUN)


@pytest.mark.slow
def test_it_is_compared_on_ray(lab, tmp_path):
    write(tmp_path)
    short = ("--iterations", 30, "--selection-iterations", 10, "--seeds", 1, "--eager", "--json", "found.json")
    said = lab("compare", "tasks:Blobs", "--optimizers", "adamw,mine", "--with", "mine_too", *short)
    assert "Learning rate of mine: " in said
    assert "Mine + CProp" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["verdicts"]) == {"CProp(AdamW)", "CProp(Mine)"}
    assert len(found["runs"]) == 4


def test_an_optimizer_that_cannot_step_is_told_before_anything_is_started(mine):
    (mine / "signs.py").write_text("def sign(x):\n    return x.no_such_method()\n")
    forget()
    load(["mine_too"])
    run = RUN.replace(workload="tasks:Blobs")
    assert trimmed(run).optimizer == trimmed(run.replace(optimizer="cprop-mine+cosine")).optimizer == "mine"
    with pytest.raises(TaskError, match=r"Blobs cannot be trained with mine: AttributeError: .*\(signs.py, line 2: "):
        check(trimmed(run))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam", "there is an optimizer 'adam' already: choose another name"),
        ("cprop-mine", "'cprop-mine' cannot be the name of an optimizer: use hyphens, and do not begin with cprop-"),
        ("my_own", "'my_own' cannot be the name of an optimizer: use hyphens"),
        ("Mine", "'Mine' cannot be the name of an optimizer: use lower-case letters, digits, hyphens and underscores"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        register_optimizer(name, Recipe("Mine", torch.optim.SGD), version="1")


def test_a_measure_of_the_library_keeps_its_name():
    with pytest.raises(ValueError, match="there is a measure 'normal' in cprop already: choose another name"):
        register_measure("normal", torch.ones_like)


@pytest.mark.slow
def test_what_has_no_source_cannot_be_identified():
    code = "from cprop_lab import *; register_optimizer('mine', Recipe('Mine', lambda params, lr: None))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500).stderr
    assert "ValueError: 'mine', an optimizer, has no source that could be hashed: register it in a .py file" in said


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"'no_such_module' cannot be imported from .*: No module named"):
        load(["no_such_module"])
