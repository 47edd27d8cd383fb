"""Tracks an LSTM's cell states in the first steps: ``python -m evidence.cell_states``.

Trains the language model without dropout from the start of its runs, at the learning rate selected for Adam and in the
precision of the results. It records the carried cell states, which are the LSTM's memory between windows, and the size
of their layers' gradients, which must be large compared to CProp's epsilon. The cases are Adam, Adam + CProp, and
changes that might help CProp: no epsilon, a learning rate warm-up, a shorter horizon, a start without CProp, more
confidence, higher precision. Other optimizers, at the learning rates that the scoreboard selected, show whether the
effect is specific to CProp.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from cprop_lab.experiments import PRESETS
from cprop_lab.experiments.rates import rate
from cprop_lab.models import AWDLSTM
from cprop_lab.run.names import PAPERS_EPS
from cprop_lab.run.provenance import commit
from cprop_lab.run.specification import Precision, Specification
from cprop_lab.run.training import Training
from cprop_lab.workloads.data import ENVIRONMENT

MARKS: Final = (5, 20, 50, 100, 175, 250)
WARM_UP: Final = 100
WATCHING: Final = 100
LR: Final = rate("ptb-lstm", "adam")
PRECISION: Final = PRESETS["reduced"].lengths["ptb-lstm"].precision
OTHERS: Final = {"sgd": 30.0, "cprop-sgd": 30.0, "adabelief": 3e-3, "lion": 1e-4, "prodigy": 3.0}
"""Learning rates that the scoreboard selected; a test checks them."""


class Case(NamedTuple):
    """A training configuration.

    Args:
        optimizer: name of the optimizer in the laboratory.
        settings: its settings.
        warm_up: number of learning rate warm-up steps.
        precision: name of the network's precision in the laboratory.
        lr: learning rate.
    """

    optimizer: str
    settings: Mapping[str, float] = {}
    warm_up: int = 0
    precision: Precision = PRECISION
    lr: float = LR


CASES: Final = {
    "Adam": Case("adam"),
    "CProp(Adam)": Case("cprop-adam"),
    "CProp(Adam), eps = 0": Case("cprop-adam", {"cprop_eps": 0.0}),
    f"CProp(Adam), warm-up of {WARM_UP} steps": Case("cprop-adam", warm_up=WARM_UP),
    "CProp(Adam), beta = 0.9": Case("cprop-adam", {"cprop_beta": 0.9}),
    f"CProp(Adam) after {WATCHING} steps of Adam": Case("cprop-adam", {"cprop_start": WATCHING}),
    "CProp(Adam), c = 3": Case("cprop-adam", {"cprop_c": 3.0}),
    "Adam, float32": Case("adam", precision="float32"),
    "CProp(Adam), float32": Case("cprop-adam", precision="float32"),
    **{
        f"{Specification('ptb-lstm', optimizer, lr).label}, lr = {lr:g}": Case(optimizer, lr=lr)
        for optimizer, lr in OTHERS.items()
    },
}


def look(case: Case, seed: int) -> list[dict[str, Any]]:
    """Train, and record at each mark the loss and the mean scale, and per layer the cell states and the gradient."""
    settings = dict(case.settings)
    if case.optimizer.startswith("cprop-"):
        settings.setdefault("cprop_eps", PAPERS_EPS)  # as in the results of this network
    run = Specification("ptb-lstm", case.optimizer, case.lr, seed=seed, settings=settings, examples=5)
    training = Training(run.replace(precision=case.precision))
    assert isinstance(training.model, AWDLSTM)
    if case.warm_up:
        training.scheduler = LinearLR(training.optimizer, 1 / case.warm_up, total_iters=case.warm_up)
    seen = []
    for mark in MARKS:
        training.advance(mark - training.step)
        row = training.evaluate()
        seen.append(
            {
                "step": mark,
                "train_loss": row["train_loss"],
                "scale": row.get("mean_scale"),
                "cells": [float(state.cell.float().abs().mean()) for state in training.model.carry()],
                "gradients": [_root_mean_square(lstm) for lstm in training.model.lstms],
            }
        )
    return seen


def _root_mean_square(layer: nn.Module) -> float:
    gradients = [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
    return float(torch.cat(gradients).square().mean().sqrt())


def main() -> None:
    """Run all cases in order; finished runs in the file are reused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"where the data are; or {ENVIRONMENT}")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, and go on from there")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ[ENVIRONMENT] = str(arguments.data)
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "commits": [],
        "lr": LR,
        "precision": PRECISION,
        "runs": [],
    }
    if arguments.json and arguments.json.exists():
        found = json.loads(arguments.json.read_text())
    there = {(run["name"], run["seed"]) for run in found["runs"]}
    wanted = [(name, seed) for seed in range(arguments.seeds) for name in CASES if (name, seed) not in there]
    for name, seed in track(wanted, description=f"runs of {MARKS[-1]} steps"):
        found["runs"].append({"name": name, "seed": seed, "seen": look(CASES[name], seed)})
        found["commits"] = sorted({*found["commits"], commit()})
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    table = Table("run", "seed", *(f"after {mark}: loss, |c|, |g|" for mark in MARKS))
    for run in found["runs"]:
        largest = ((row["train_loss"], max(row["cells"]), max(row["gradients"])) for row in run["seen"])
        cells = (f"{loss:.2f}, {cell:.1f}, {gradient:.0e}" for loss, cell, gradient in largest)
        table.add_row(run["name"], str(run["seed"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
