"""What a command says that it will run, at least and at most, is what it runs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from test_experiments import SMALL
from typer.testing import CliRunner

from cprop_lab.cli import app
from cprop_lab.experiments import EXPERIMENTS
from cprop_lab.experiments.comparison import compare, planned
from cprop_lab.experiments.selection import STAGES, grid
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run, Store

BLOBS = Specification("tasks:Blobs", "sgd", lr=1.0, iterations=100, evaluate_every=2)


class Pretended:
    """Gives runs that were not made. The best learning rate is so many places of the grid above the guess."""

    def __init__(self, places):
        self.places, self.best, self.ids = places, {}, set()

    def __call__(self, specifications):
        rates = {}
        for one in specifications:
            rates.setdefault(one.replace(lr=1.0, seed=0), set()).add(one.lr)
        for search, tried in rates.items():
            self.best.setdefault(search, grid(sorted(tried)[len(tried) // 2], self.places))
        wanted = {run_id(one): one for one in specifications}
        self.ids |= wanted.keys()
        return [self.run(name, one) for name, one in wanted.items()]

    def run(self, name, specification):
        loss = abs(math.log(specification.lr / self.best[specification.replace(lr=1.0, seed=0)]))
        columns = {"step": np.arange(4), "train_loss": np.full(4, loss + specification.seed)}
        return Run(name, specification, "finished", {}, columns)


def comparison(run):
    return compare(BLOBS, ["sgd", "adam", "schedule-free-adamw"], run, seeds=2)


SCOREBOARD = EXPERIMENTS["scoreboard-fmnist-fc"].only(["adamw", "adamw+cosine", "muon"])
CASES = {
    "compare": (planned(BLOBS, ["sgd", "adam", "schedule-free-adamw"], seeds=2), comparison),
    **{
        name: (
            EXPERIMENTS[name].plan(SMALL, select=True),
            lambda run, name=name: EXPERIMENTS[name].run(SMALL, run, select=True),
        )
        for name in ("fmnist-fc", "smaller-rates", "lr-selection-fmnist-fc")
    },
    "scoreboard": (
        SCOREBOARD.plan(replace(SMALL, seeds=3), select=True),
        lambda run: SCOREBOARD.run(replace(SMALL, seeds=3), run, select=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_fewer_and_no_more_runs_than_said(name):
    plan, protocol = CASES[name]
    made = {}
    for places in (0, 1, 1 - STAGES, STAGES - 1):
        pretended = Pretended(places)
        protocol(pretended)
        made[places] = len(pretended.ids)
    assert len(plan.least) <= made[0] < made[1] < made[STAGES - 1] <= len(plan.most)
    assert made[1 - STAGES] <= len(plan.most)
    if name != "scoreboard":  # whose rows may turn out to be the same, or too close
        assert (len(plan.least), len(plan.most)) == (made[0], made[STAGES - 1])


@pytest.mark.parametrize("experiment", ["fmnist-fc", "scoreboard-fmnist-fc"])
def test_with_given_rates_the_runs_are_known(experiment):
    chosen = EXPERIMENTS[experiment]
    plan, pretended = chosen.plan(SMALL, select=False), Pretended(0)
    chosen.run(SMALL, pretended, select=False)
    assert len(plan.least) == len(plan.most) == len(pretended.ids)


@pytest.mark.slow
def test_a_dry_run_says_what_a_real_run_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "tasks:Blobs", "--optimizers", "sgd", "--iterations", "20", "--executor", "process"]

    def dry(*more):
        told = CliRunner().invoke(app, [*words, "--dry-run", *more])
        assert told.exit_code == 0, told.stdout
        numbers = re.findall(r"(?:runs|to be run) +(\d+) +(\d+)", told.stdout)
        return [tuple(map(int, pair)) for pair in numbers]

    def finished():
        return len(Store(tmp_path / "results").finished())

    planned, to_run = dry("--seeds", "1")
    assert planned == to_run == (5, 16)  # three to fourteen learning rates, then without and with CProp
    assert CliRunner().invoke(app, [*words, "--seeds", "1"]).exit_code == 0
    before = finished()
    assert planned[0] <= before <= planned[1]
    assert dry("--seeds", "1") == [(before, before), (0, 0)]
    _, (least, most) = dry("--seeds", "2")
    assert CliRunner().invoke(app, [*words, "--seeds", "2"]).exit_code == 0
    assert least <= finished() - before <= most < 32
    assert dry("--seeds", "2")[1] == (0, 0)
