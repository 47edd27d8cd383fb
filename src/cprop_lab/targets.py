"""How long a run takes to reach a target, in iterations and in seconds: the measure of AlgoPerf.

A final loss says little about the time saved. So the question is turned around: when does a run first reach
another run's final loss?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, NamedTuple

import numpy as np

from cprop_lab import optimizers
from cprop_lab.learning_rate import WINDOW, final_loss
from cprop_lab.results import Run
from cprop_lab.specification import Specification

__all__ = [
    "Pair",
    "Ratio",
    "Spread",
    "as_measured",
    "at",
    "by_seed",
    "ended",
    "outcome",
    "pairs",
    "ratio",
    "reached",
    "seconds_a_step",
    "shown",
    "smoothed",
    "spread",
]


class Spread(NamedTuple):
    """A mean over seeds, one standard deviation, and the half-width of a 95 % interval of the mean (Student's t)."""

    mean: float
    deviation: float
    margin: float

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + (f" ± {self.deviation:.2g}" if math.isfinite(self.deviation) else "")


NOTHING: Final = "-"
"""Stands in tables where there is no number."""

# Student's t at 97.5 %, by degrees of freedom; beyond these, the normal distribution's is close enough.
_T: Final = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def spread(values: Sequence[float]) -> Spread:
    """The mean of some values, and how certain it is.

    Example:
        >>> str(spread([1.0, 2.0, 3.0]))
        '2 ± 1'
        >>> spread([1.0]).margin
        inf
    """
    if len(values) < 2:
        return Spread(fmean(values), math.nan, math.inf)
    deviation = stdev(values)
    t = _T[len(values) - 1] if len(values) <= len(_T) else 1.96
    return Spread(fmean(values), deviation, t * deviation / math.sqrt(len(values)))


class Ratio(NamedTuple):
    """A ratio averaged over seeds, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def ratio(values: Sequence[float]) -> Ratio:
    """The geometric mean of some ratios, and its 95 % interval, which is symmetric on a log scale.

    On a linear scale, the interval of a ratio may reach below zero: it would claim savings of more than everything.

    Example:
        >>> [round(value, 2) for value in ratio([0.5, 0.5, 0.6])]
        [0.53, 0.41, 0.69]
    """
    mean, _, margin = spread([math.log(value) for value in values])
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))


def shown(values: Iterable[float], unit: str = "", nothing: str = NOTHING, digits: int | None = None) -> str:
    """Mean and one standard deviation of the finite values.

    Args:
        values: one per seed.
        unit: put after them.
        nothing: said if no value is finite.
        digits: significant digits of the mean; by default as many as the deviation leaves.

    Example:
        >>> shown([2934, 2951]), shown([2934, 2951], digits=3)
        ('2,942 ± 12', '2,940 ± 10')
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return nothing
    mean, deviation, _ = spread(values)
    if digits is not None:
        places = _places(mean, digits)
        parts = [mean, deviation] if deviation > 0 else [mean]
        return " ± ".join(f"{round(part, places):,.{max(0, places)}f}" for part in parts) + unit
    if not deviation > 0:  # one seed, or all seeds alike
        text = f"{mean:,.{_decimals(mean, 4)}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + unit
    decimals = min(_decimals(deviation, 2), _decimals(mean, 6))
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}{unit}"


def _places(value: float, digits: int) -> int:
    """Where to round a value to keep so many digits of it; negative left of the decimal point."""
    return digits - 1 - math.floor(math.log10(abs(value))) if value else 0


def _decimals(value: float, digits: int) -> int:
    """How many decimals show so many digits of a value."""
    return max(0, _places(value, digits))


def smoothed(run: Run, column: str = "train_loss") -> np.ndarray:
    """A curve, with each value averaged over the preceding few."""
    values = run.column(column)
    return np.array([values[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(values))])


def ended(runs: Iterable[Run], column: str, nothing: str = "diverged", digits: int | None = None) -> str:
    """A curve's final value, over seeds; runs that diverged are left out."""
    ends = (float(smoothed(run, column)[-1]) for run in runs if run.status == "finished")
    return as_measured(ends, column, nothing, digits)


def as_measured(values: Iterable[float], column: str, nothing: str = NOTHING, digits: int | None = None) -> str:
    """Values of a curve, over seeds, in the unit that people know them by."""
    times, unit = (100, " %") if column == "accuracy" else (1, "")
    return shown((times * value for value in values), unit, nothing, digits)


def reached(run: Run, target: float) -> float | None:
    """The iteration at which a run's training loss first reaches a target, interpolated between rows; None if never."""
    losses = smoothed(run)
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    last = int(below[0])
    first = max(last - 1, 0)
    part = 1.0 if first == last else (losses[first] - target) / (losses[first] - losses[last])
    steps = run.column("step")
    return float(steps[first] + part * (steps[last] - steps[first]))


def at(run: Run, iteration: float, column: str) -> float:
    """A curve's value at an iteration, smoothed like the training loss and interpolated between rows."""
    return float(np.interp(iteration, run.column("step"), smoothed(run, column)))


def seconds_a_step(run: Run) -> float:
    """Seconds per step: the median over the stretches between evaluations, which short disturbances do not change."""
    return float(np.median(np.diff(run.column("seconds")) / np.diff(run.column("step"))))


@dataclass(frozen=True)
class Pair:
    """An optimizer without and with CProp, seed by seed: what CProp saves on the way to the plain one's final loss.

    Seeds that did not learn without CProp (they diverged, or ended no lower than they started) have no target and are
    left out.

    Args:
        plain: the runs without CProp, ordered by seed.
        scaled: the runs with CProp, in the same order.
    """

    plain: Sequence[Run]
    scaled: Sequence[Run]

    @property
    def learned(self) -> list[tuple[Run, Run, float]]:
        """The seeds that have a target: both runs, and the plain one's final training loss."""
        both = zip(self.plain, self.scaled, strict=True)
        found = [(plain, scaled, final_loss(plain)) for plain, scaled in both]
        return [(p, s, target) for p, s, target in found if 0 < when(p, target, "iterations") < math.inf]

    @property
    def targets(self) -> list[float]:
        """The final training loss without CProp, by seed."""
        return [target for *_, target in self.learned]

    def times(self, of: str) -> list[tuple[float, float]]:
        """By seed, when both runs reach the target, in ``"iterations"`` or ``"seconds"``; infinite if never."""
        return [(when(plain, target, of), when(scaled, target, of)) for plain, scaled, target in self.learned]

    def shares(self, of: str) -> list[float]:
        """By seed, CProp's iterations or seconds to the target divided by the plain run's; infinite if it misses."""
        return [ours / theirs for theirs, ours in self.times(of)]

    def there(self, column: str) -> list[tuple[float, float]]:
        """By seed, the value of another curve at the target, for both runs, if both reach it.

        At the end of their runs the one with CProp is further along; at the target both have the same training loss.
        """
        arrivals = zip(self.learned, self.times("iterations"), strict=True)
        return [
            (at(plain, theirs, column), at(scaled, ours, column))
            for (plain, scaled, _), (theirs, ours) in arrivals
            if math.isfinite(ours)
        ]


def outcome(pair: Pair, of: str) -> str:
    """The outcome of a pair in a few words: CProp's ratio, or how many seeds missed the target."""
    shares = pair.shares(of)
    missed = sum(map(math.isinf, shares))
    parts = []
    if missed:
        parts.append("not reached" + f" by {missed} of {len(shares)}" * (missed < len(shares)))
    elif shares:
        mean, deviation, _ = spread(shares)
        parts.append(f"{mean:.2f}" + f" ± {deviation:.2f}" * math.isfinite(deviation))
    if len(shares) < len(pair.plain):
        parts.append(f"{len(pair.plain) - len(shares)} of {len(pair.plain)} did not learn without CProp")
    return ", ".join(parts)


def when(run: Run, target: float, of: str) -> float:
    """When a run reaches a target; infinite if never. A run that diverged counts as never, even if it got there before.

    Seconds are iterations times the seconds per step: the clock of a long run also counts interruptions.
    """
    iterations = None if run.status == "diverged" or math.isinf(target) else reached(run, target)
    if iterations is None:
        return math.inf
    return iterations * seconds_a_step(run) if of == "seconds" else iterations


def _setting(specification: Specification) -> tuple[object, ...]:
    """What both runs of a pair have in common; learning rates may differ, if both were selected."""
    return (
        specification.workload,
        tuple(specification.options.items()),
        specification.batch_size,
        specification.iterations,
        specification.precision,
    )


def by_seed(runs: Iterable[Run]) -> dict[Specification, list[Run]]:
    """Groups of runs that differ only in their seed, ordered by seed."""
    groups: dict[Specification, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.specification.seed):
        groups.setdefault(run.specification.group(), []).append(run)
    return groups


def pairs(runs: Iterable[Run]) -> dict[str, Pair]:
    """All optimizers that ran on the same seeds without and with CProp, by the name figures use for the latter.

    If the plain one ran at several learning rates, CProp is paired with each.
    """
    groups = by_seed(runs)
    several = len({group.workload for group in groups}) > 1
    found = {}
    for scaled, with_cprop in groups.items():
        name = optimizers.parse(scaled.optimizer)
        if not name.cprop:
            continue
        plain = {
            group: without
            for group, without in groups.items()
            if group.optimizer == str(name._replace(cprop=False))
            and _setting(group) == _setting(scaled)
            and [r.specification.seed for r in without] == [r.specification.seed for r in with_cprop]
        }
        about = f"{scaled.workload}: " * several + optimizers.label(scaled) + facet(scaled)
        for group, without in plain.items():
            against = f" against learning rate {group.lr:g}" * (len(plain) > 1)
            found[about + against] = Pair(without, with_cprop)
    return found


def facet(specification: Specification) -> str:
    """What distinguishes a run from others of its experiment, besides its optimizer."""
    options = specification.options.items()
    parts = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options]
    if specification.batch_size != 32:
        parts.append(f"batch size {specification.batch_size}")
    return f" ({', '.join(parts)})" if parts else ""
