"""Training loss by CProp's epsilon: ``python -m evidence.epsilon``.

Short runs of a network of the laboratory's, with the paper's 1e-8 and with none, at the same learning rates and seeds.
Some run once more with gradients multiplied by 2^-27, about 1e-8, as if the model were much larger. The optimizer
inside is rescaled to match, so that without CProp, powers of two being exact, nothing at all would change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from cprop_lab.experiments.rates import rate
from cprop_lab.run.provenance import commit
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training, arithmetic
from cprop_lab.workloads.data import ENVIRONMENT

EPSILONS: Final = (1e-8, 0.0)
SMALLER: Final = 2.0**-27


class Case(NamedTuple):
    """A training configuration, but for epsilon and the seed.

    Args:
        workload: name of the network and its data in the laboratory.
        base: name of the optimizer inside.
        iterations: number of steps.
        batch_size: examples per step.
        smaller: whether gradients are multiplied by :data:`SMALLER`.
    """

    workload: str
    base: str
    iterations: int = 5_000
    batch_size: int = 32
    smaller: bool = False

    def train(self, seed: int, eps: float) -> dict[str, Any]:
        """Train once, and return the losses at the end."""
        lr, settings = rate(self.workload, self.base), {"cprop_eps": eps}
        if self.smaller:  # SGD is restored by its learning rate; Adam only needs its own epsilon to match
            lr, inside = (lr / SMALLER, {}) if self.base == "sgd" else (lr, {"eps": 1e-8 * SMALLER})
            settings |= inside
        training = Training(
            Specification(
                self.workload,
                f"cprop-{self.base}",
                lr=lr,
                seed=seed,
                batch_size=self.batch_size,
                iterations=self.iterations,
                settings=settings,
            )
        )
        if self.smaller:
            training.task.before_step = shrink  # type: ignore[method-assign]
        with arithmetic():
            training.advance(self.iterations)
            return {**self._asdict(), "seed": seed, "eps": eps, **losses(training.evaluate())}


CASES: Final = (
    Case("fmnist-fc", "sgd"),
    Case("fmnist-fc", "adam", 1_000),
    Case("fmnist-fc", "adam"),
    *(Case("fmnist-fc", base, 500, smaller=True) for base in ("sgd", "adam")),
)


def shrink(model: nn.Module) -> None:
    """Make all gradients small."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(SMALLER)


def losses(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation that are compared."""
    return {name: row[name] for name in ("train_loss", "test_loss", "mean_scale")}


def main() -> None:
    """Run the comparison from the command line; runs that the file has already are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the laboratory's data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, and continue it")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ[ENVIRONMENT] = str(arguments.data)
    torch.set_num_threads(1)
    known = json.loads(arguments.json.read_text())["runs"] if arguments.json and arguments.json.exists() else []
    runs: dict[tuple[Case, int, float], dict[str, Any]] = {
        (Case(*(run[name] for name in Case._fields)), run["seed"], run["eps"]): run for run in known
    }
    for case in CASES:
        for seed in range(arguments.seeds):
            for eps in EPSILONS:
                if (case, seed, eps) not in runs:
                    runs[case, seed, eps] = {**case.train(seed, eps), "torch": torch.__version__, "commit": commit()}
                    if arguments.json:
                        text = json.dumps({"runs": list(runs.values())}, indent=1)
                        arguments.json.write_text(text + "\n")
    print_table(runs, arguments.seeds)


def print_table(runs: Mapping[tuple[Case, int, float], Mapping[str, Any]], seeds: int) -> None:
    """Losses by case and epsilon."""
    table = Table(*Case._fields, "eps", "training loss", "by seed")
    for case in CASES:
        for eps in EPSILONS:
            found = [runs[case, seed, eps]["train_loss"] for seed in range(seeds)]
            table.add_row(
                *map(str, case), f"{eps:g}", f"{statistics.mean(found):.4f}", ", ".join(f"{loss:.4f}" for loss in found)
            )
    Console().print(table)


if __name__ == "__main__":
    main()
