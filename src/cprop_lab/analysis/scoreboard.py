"""The scoreboard: how long every optimizer takes to reach the same two training losses, in iterations and seconds.

What is run for it is decided in :mod:`cprop_lab.experiments.scoreboard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from cprop_lab.analysis.curves import final_loss, seconds_per_step, smoothed, when
from cprop_lab.analysis.groups import by_seed, names
from cprop_lab.run.specification import Specification
from cprop_lab.store import Manifest, Run

__all__ = ["TARGETS", "Entry", "Target", "part_in_words", "score", "scores"]


@dataclass(frozen=True)
class Target:
    """A training loss to reach.

    Args:
        optimizer: the one whose final loss it is.
        title: its name in tables.
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
        name: of the optimizer, as in figures.
        runs: its runs, ordered by seed.
        iterations: by target and seed, the fraction of a run at which it was reached; infinite if never.
        cost: seconds per step, relative to Adam's.
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
        """Iterations or seconds to a target, as a fraction of Adam's run: the median over seeds."""
        return median(self.iterations[target]) * (self.cost if of == "seconds" else 1.0)

    def end(self, column: str = "train_loss") -> list[float]:
        """A curve's final value by seed; diverged runs are left out."""
        return [float(smoothed(run, column)[-1]) for run in self.runs if run.status == "finished"]


def score(runs: Iterable[Run], timings: Iterable[Run]) -> list[Entry]:
    """Rank optimizers, from the one that reaches the targets first to those that do not.

    Args:
        runs: of one workload; Adam's must be among them.
        timings: separate short runs for the seconds per step, see :mod:`cprop_lab.experiments.scoreboard`.

    Raises:
        ValueError: if a target's optimizer is missing.
    """
    groups = by_seed(runs)
    goals = [_losses(groups, target) for target in TARGETS]
    seconds: dict[str, float] = {}
    for run in timings:
        # Other work on the machine makes a step longer, never shorter.
        found = seconds.get(run.specification.optimizer, math.inf)
        seconds[run.specification.optimizer] = min(found, seconds_per_step(run))
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


def scores(manifest: Manifest, runs: Sequence[Run], timings: Sequence[Run]) -> list[Entry]:
    """A scoreboard's rows; none while runs are missing, or for other experiments."""
    complete = len(runs) == len(manifest["runs"]) > 0
    return score(runs, timings) if manifest["kind"] == "scoreboard" and complete else []


def part_in_words(entry: Entry, target: int, of: str = "iterations") -> str:
    """The fraction of Adam's run that a target took, and how many seeds reached it, if not all."""
    part, parts = entry.part(target, of), entry.iterations[target]
    reached = sum(map(math.isfinite, parts))
    if not reached:
        return "not reached"
    some = f"reached by {reached} of {len(parts)}"
    if reached == len(parts):
        return f"{part:.2f}"
    return f"{part:.2f} ({some})" if math.isfinite(part) else some


def _losses(groups: dict[Specification, list[Run]], target: Target) -> dict[int, float]:
    """The loss to reach, by seed."""
    for group, runs in groups.items():
        if group.optimizer == target.optimizer:
            return {run.specification.seed: final_loss(run) for run in runs}
    raise ValueError(f"no run of {target.optimizer} is finished, whose final training loss is the scoreboard's target")


def _part(run: Run, goal: float) -> float:
    return when(run, goal, "iterations") / run.specification.iterations
