"""The scoreboard: every optimizer's way to the same two training losses, in iterations and in seconds.

Its rules were written down before its runs (docs/results/scoreboard.md). In short: every optimizer without CProp has
its learning rate selected by the same procedure, CProp takes that of the optimizer inside, and an optimizer's score is
when it comes to the training loss at which tuned Adam ends, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from cprop_lab import optimizers
from cprop_lab.groups import WORDS, judged_by, names
from cprop_lab.learning_rate import final_loss
from cprop_lab.results import Run
from cprop_lab.specification import Specification
from cprop_lab.targets import by_seed, ended, seconds_a_step, smoothed, when

__all__ = [
    "ROWS",
    "TARGETS",
    "Entry",
    "Target",
    "part_in_words",
    "score",
    "settings",
    "table",
    "timing",
]

ROWS: Final = (
    *("sgd", "cprop-sgd", "adam", "cprop-adam", "adam+ema", "cprop-adam+ema"),
    *("adamw", "cprop-adamw", "adamw+cosine", "cprop-adamw+cosine"),
    *("schedule-free-adamw", "schedule-free-cprop", "cautious-adamw", "prodigy", "lion", "adabelief"),
)
TIMINGS: Final = 3
"""Short runs of every row for the seconds of a step, in turn; the fastest counts."""
WEIGHT_DECAY: Final = 0.01
"""Of AdamW, torch's default: without any it would be Adam. The others have none, for training losses are compared."""


@dataclass(frozen=True)
class Target:
    """A training loss to be reached.

    Args:
        optimizer: the one that ends with it.
        title: what it is called.
    """

    optimizer: str
    title: str


TARGETS: Final = (
    Target("adam", "to Adam's final loss"),
    Target("adamw+cosine", "to the final loss of AdamW with cosine decay"),
)


@dataclass(frozen=True)
class Entry:
    """A row of the scoreboard.

    Args:
        name: as figures call the optimizer.
        runs: its runs, in the order of their seeds.
        iterations: by target and seed, the part of a run's length at which it was reached; infinite if it never was.
        cost: seconds of a step, as a part of Adam's.
    """

    name: str
    runs: Sequence[Run]
    iterations: Sequence[Sequence[float]]
    cost: float

    @property
    def specification(self) -> Specification:
        """What its runs have in common."""
        return self.runs[0].specification.group()

    def part(self, target: int, of: str = "iterations") -> float:
        """The median over seeds of the iterations to a target, or of the seconds, as a part of Adam's whole run."""
        return median(self.iterations[target]) * (self.cost if of == "seconds" else 1.0)

    def end(self, column: str = "train_loss") -> list[float]:
        """By seed, what a curve ends with; diverged runs are left out."""
        return [float(smoothed(run, column)[-1]) for run in self.runs if run.status == "finished"]


def score(runs: Iterable[Run], timings: Iterable[Run]) -> list[Entry]:
    """Put optimizers in order, from the one that reaches the targets first to those that do not.

    Args:
        runs: of one workload; Adam's must be among them.
        timings: short runs made apart, as :func:`timing` has them, for the seconds of a step.

    Raises:
        ValueError: if a target's optimizer is missing.
    """
    groups = by_seed(runs)
    goals = [_losses(groups, target) for target in TARGETS]
    seconds: dict[str, float] = {}
    for run in timings:
        # Whatever else goes on makes a step longer, never shorter.
        found = seconds.get(run.specification.optimizer, math.inf)
        seconds[run.specification.optimizer] = min(found, seconds_a_step(run))
    adams = seconds.get(TARGETS[0].optimizer, math.nan)
    called = names(groups)
    entries = [
        Entry(
            called[group],
            own,
            [[_part(run, goal[run.specification.seed]) for run in own] for goal in goals],
            seconds.get(group.optimizer, math.nan) / adams,
        )
        for group, own in groups.items()
    ]

    def order(entry: Entry) -> tuple[float, ...]:
        return (*(entry.part(target) for target in range(len(TARGETS))), fmean(entry.end() or [math.inf]))

    return sorted(entries, key=order)


def table(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of a table, as text."""
    column = judged_by(entries[0].runs)
    heads = ["optimizer", "learning rate"]
    for target in TARGETS:
        heads += [f"iterations {target.title}", f"seconds {target.title}"]
    ends = dict.fromkeys(("train_loss", "test_loss", column))
    heads += ["time per step", *(f"final {WORDS[name]}" for name in ends)]
    rows = [
        [
            entry.name,
            f"{entry.specification.lr:g}",
            *(part_in_words(entry, target, of) for target in range(len(TARGETS)) for of in ("iterations", "seconds")),
            f"{entry.cost:.2f}",
            *(ended(entry.runs, name) for name in ends),
        ]
        for entry in entries
    ]
    return heads, rows


def part_in_words(entry: Entry, target: int, of: str = "iterations") -> str:
    """The part of Adam's run that a target took, and by how many seeds it was reached, if not by all."""
    part, parts = entry.part(target, of), entry.iterations[target]
    reached = sum(map(math.isfinite, parts))
    if not reached:
        return "not reached"
    some = f"reached by {reached} of {len(parts)}"
    if reached == len(parts):
        return f"{part:.2f}"
    return f"{part:.2f} ({some})" if math.isfinite(part) else some


def _losses(groups: dict[Specification, list[Run]], target: Target) -> dict[int, float]:
    """By seed, the loss that is to be reached."""
    for group, runs in groups.items():
        if group.optimizer == target.optimizer:
            return {run.specification.seed: final_loss(run) for run in runs}
    raise ValueError(f"no run of {target.optimizer} is finished, whose final training loss is the scoreboard's target")


def _part(run: Run, goal: float) -> float:
    return when(run, goal, "iterations") / run.specification.iterations


def timing(specification: Specification, iterations: int) -> Specification:
    """A short run for the seconds of a step.

    Long runs share their machine with other work, and not always with the same; short ones can be made in turn when
    nothing else is going on.
    """
    every = max(1, iterations // 10)
    # Evaluations only part the run into stretches, and an example of a text is a window: a hundred take minutes.
    few = max(1, min(100, specification.examples // 20))
    return specification.but(iterations=max(10, iterations), evaluate_every=every, examples=few)


def settings(optimizer: str) -> dict[str, float]:
    """What a row sets beside the defaults."""
    return {"weight_decay": WEIGHT_DECAY} if optimizers.parse(optimizer).base == "adamw" else {}
