"""The scoreboard: how long every optimizer takes to reach the same two training losses, in iterations and seconds.

What is run for it is decided in :mod:`cprop_lab.experiments.scoreboard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final, NamedTuple

from cprop_lab.analysis.curves import at, final_loss, smoothed, undisturbed_seconds_per_step, when
from cprop_lab.analysis.groups import common_seeds
from cprop_lab.analysis.spread import spread
from cprop_lab.run.specification import Specification
from cprop_lab.store import Manifest, Run

__all__ = [
    "FURTHEST",
    "HORIZON",
    "OF_ITS_OWN",
    "Difference",
    "Entry",
    "benchmark_score",
    "difference",
    "gain",
    "part_in_words",
    "profile",
    "score",
    "scores",
    "to_the_loss_of",
    "undecided",
]

FURTHEST: Final = 4.0
"""How many times the fewest iterations a performance profile goes; AlgoPerf's."""

COUNTS: Final = 3.0
"""A difference counts if it is more than this many times its standard error."""

OF_ITS_OWN: Final = ", own rate"
"""Ends the name of a row that is tuned by itself where another row takes what was tuned for the optimizer inside."""

HORIZON: Final = 4
"""Results are also shown for runs this many times shorter, and the runs that tune a row are that short."""


def to_the_loss_of(optimizer: str) -> str:
    """A target's title: whose final training loss is to be reached.

    Example:
        >>> to_the_loss_of("adamw"), to_the_loss_of("adamw+cosine")
        ("to AdamW's final loss", 'to the final loss of AdamW with cosine decay')
    """
    label, _, schedule = _label(optimizer).partition(", ")
    return f"to the final loss of {label} with {schedule} decay" if schedule else f"to {label}'s final loss"


@dataclass(frozen=True)
class Entry:
    """A row of the scoreboard.

    Args:
        name: of the row.
        runs: ordered by seed.
        short: its runs a quarter as long, if it must know when they end.
        targets: the optimizers whose final losses are to be reached.
        iterations: by target and seed, the fraction of a run at which it was reached; infinite if never.
        cost: seconds per step, relative to those of the first target's optimizer.
    """

    name: str
    runs: Sequence[Run]
    short: Sequence[Run]
    targets: Sequence[str]
    iterations: Sequence[Sequence[float]]
    cost: float

    @property
    def specification(self) -> Specification:
        """What its runs have in common."""
        return self.runs[0].specification.group()

    def part(self, target: int, of: str = "iterations") -> float:
        """Iterations or seconds to a target, as a fraction of the target's run: the median over seeds."""
        return median(self.iterations[target]) * (self.cost if of == "seconds" else 1.0)

    def end(self, column: str = "train_loss") -> list[float]:
        """A curve's final value by seed; diverged runs are left out."""
        return [float(smoothed(run, column)[-1]) for run in self.runs if run.status == "finished"]

    def early(self, column: str = "train_loss") -> list[float]:
        """A curve's value at the end of runs :data:`HORIZON` times shorter."""
        of = self.short or self.runs
        step = self.specification.iterations / HORIZON
        return [at(run, step, column) for run in of if run.status == "finished"]


def score(
    rows: Mapping[str, Sequence[Run]],
    targets: Sequence[str],
    timings: Iterable[Run] = (),
    short: Mapping[str, Sequence[Run]] | None = None,
) -> list[Entry]:
    """Rank optimizers, from the one that reaches the targets first to those that do not.

    Args:
        rows: the runs of each row, by its name.
        targets: the optimizers whose final losses are to be reached.
        timings: separate short runs for the seconds per step.
        short: by row, runs a quarter as long.

    Raises:
        ValueError: if a target's optimizer is missing.
    """
    goals = [_losses(rows.values(), target) for target in targets]
    seconds: dict[str, float] = {}
    for run in timings:
        found = seconds.get(run.specification.label, math.inf)
        seconds[run.specification.label] = min(found, undisturbed_seconds_per_step(run))
    baseline = seconds.get(_label(targets[0]), math.nan)
    entries = [
        Entry(
            name,
            own,
            (short or {}).get(name, ()),
            targets,
            # A row may have more seeds than the target's optimizer.
            [[_part(run, goal[seed]) for run in own if (seed := run.specification.seed) in goal] for goal in goals],
            seconds.get(own[0].specification.label, math.nan) / baseline,
        )
        for name, runs in rows.items()
        for own in [sorted(runs, key=lambda run: run.specification.seed)]
    ]

    def order(entry: Entry) -> tuple[float, ...]:
        return (*(entry.part(target) for target in range(len(targets))), fmean(entry.end() or [math.inf]))

    return sorted(entries, key=order)


def scores(manifest: Manifest, runs: Sequence[Run], timings: Sequence[Run]) -> list[Entry]:
    """A scoreboard's rows; none while runs are missing, or for other experiments."""
    if "rows" not in manifest or len(runs) != len(manifest["runs"]):
        return []
    known = {run.run_id: run for run in runs}
    rows, short = ({row: [known[i] for i in ids] for row, ids in manifest[of].items()} for of in ("rows", "short"))
    return score(rows, manifest["targets"], timings, short)


def undecided(rows: Mapping[str, Sequence[Run]], pairs: Iterable[tuple[str, str]]) -> set[str]:
    """The rows that need more seeds: final losses within a standard deviation of each other.

    Compared are the pairs, and the neighbours among the four rows with the lowest losses.
    """
    ends = {title: spread([final_loss(run) for run in runs]) for title, runs in rows.items()}
    ends = {title: end for title, end in ends.items() if math.isfinite(end.mean)}
    leading = sorted(ends, key=lambda title: ends[title].mean)[:4]
    compared = [pair for pair in (*pairs, *pairwise(leading)) if ends.keys() >= set(pair)]
    close = (
        pair
        for pair in compared
        if abs(ends[pair[0]].mean - ends[pair[1]].mean) < max(ends[title].deviation for title in pair)
    )
    return {title for pair in close for title in pair}


class Difference(NamedTuple):
    """How much lower one row's final training loss is than another's, seed by seed, and its standard error."""

    mean: float
    error: float

    @property
    def counts(self) -> bool:
        """Whether it is a difference, or a tie."""
        return math.isinf(self.mean) or abs(self.mean) > COUNTS * self.error  # infinite if one of them diverged

    def __str__(self) -> str:
        return f"{abs(self.mean):.2g} {'lower' if self.mean > 0 else 'higher'}" if self.counts else "tie"


def difference(row: Sequence[Run], other: Sequence[Run]) -> Difference:
    """How much lower a row's final training loss is than another's, over the seeds that both have."""
    both = common_seeds(row, other)
    mean, deviation, _ = spread([final_loss(there) - final_loss(here) for here, there in both])
    return Difference(mean, deviation / math.sqrt(len(both)))


def gain(entry: Entry, entries: Iterable[Entry]) -> Difference | None:
    """How much lower CProp's row ends than the same optimizer without it; None for rows without CProp.

    A row with a rate of its own is compared with one that has too, if there is one.
    """
    name = entry.specification.optimizer_name
    plain = [other for other in entries if name.cprop and other.specification.optimizer == name.plain]
    alike = [other for other in plain if other.name.endswith(OF_ITS_OWN) == entry.name.endswith(OF_ITS_OWN)]
    return next((difference(entry.runs, other.runs) for other in (*alike, *plain)), None)


def profile(boards: Sequence[Sequence[Entry]], target: int = 0) -> dict[str, list[float]]:
    """A performance profile (Dolan and Moré, 2002): how far each row is behind the fastest, on every workload.

    Args:
        boards: the rows of each workload.
        target: which target is to be reached.

    Returns:
        By row, its iterations on each workload as a multiple of the fewest; infinite where it does not get there. Rows
        that a workload lacks are left out.
    """
    parts = [{entry.name: entry.part(target) for entry in entries} for entries in boards]
    everywhere = [name for name in parts[0] if all(name in own for own in parts)]
    return {name: [own[name] / min(own.values()) for own in parts] for name in everywhere}


def benchmark_score(ratios: Sequence[float]) -> float:
    """AlgoPerf's score: the area under a row's performance profile, from one to :data:`FURTHEST`, between 0 and 1.

    Example:
        >>> benchmark_score([1.0, 2.5, math.inf])
        0.5
    """
    return fmean(max(0.0, FURTHEST - ratio) / (FURTHEST - 1) for ratio in ratios)


def part_in_words(entry: Entry, target: int, of: str = "iterations") -> str:
    """The fraction of the target's run that it took, and how many seeds reached it, if not all."""
    part, parts = entry.part(target, of), entry.iterations[target]
    reached = sum(map(math.isfinite, parts))
    if not reached:
        return "not reached"
    some = f"reached by {reached} of {len(parts)}"
    if reached == len(parts):
        return f"{part:.2f}"
    return f"{part:.2f} ({some})" if math.isfinite(part) else some


def _label(optimizer: str) -> str:
    return Specification("", optimizer, lr=1.0).label


def _losses(rows: Iterable[Sequence[Run]], target: str) -> dict[int, float]:
    """The loss to reach, by seed."""
    for runs in rows:
        if runs[0].specification.optimizer == target:
            return {run.specification.seed: final_loss(run) for run in runs}
    raise ValueError(
        f"no run of {target} is finished, whose final training loss is the scoreboard's target: include it"
    )


def _part(run: Run, goal: float) -> float:
    return when(run, goal, "iterations") / run.specification.iterations
