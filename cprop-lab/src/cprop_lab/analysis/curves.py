"""A run's curves: smoothed, at their end, over seeds, and the time they take to reach a target.

A final loss says little about the time saved. So the question is turned around, as in AlgoPerf: when does a run first
reach another run's final loss, in iterations and in seconds?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from cprop_lab.analysis.spread import Spread, as_measured, spread
from cprop_lab.store import Run

__all__ = [
    "WINDOW",
    "at",
    "before_divergence",
    "by_step",
    "choose",
    "ended",
    "final_loss",
    "over_seeds",
    "reached",
    "seconds_per_step",
    "smoothed",
    "undisturbed_seconds_per_step",
    "when",
]

Rate = TypeVar("Rate", int, float)

WINDOW: Final = 3
"""Rows of a curve that are averaged before it is compared: single evaluations are noisy."""


def smoothed(run: Run, column: str = "train_loss") -> np.ndarray:
    """A curve, with each value averaged over the preceding few; computed once per run."""
    if column not in run.cache:
        values = run.column(column)
        padded = np.concatenate([np.zeros(WINDOW - 1), values])
        sums = sum(padded[i : i + len(values)] for i in range(WINDOW))
        run.cache[column] = sums / np.minimum(np.arange(1, len(values) + 1), WINDOW)
    return run.cache[column]


def final_loss(run: Run) -> float:
    """A run's final training loss, averaged over the last few evaluations; infinite if it diverged."""
    losses = run.column("train_loss")[-WINDOW:]
    return math.inf if run.status == "diverged" else float(losses.mean())


def ended(runs: Iterable[Run], column: str, nothing: str = "diverged", digits: int | None = None) -> str:
    """A curve's final value, over seeds; runs that diverged are left out."""
    ends = (float(smoothed(run, column)[-1]) for run in runs if run.status == "finished")
    return as_measured(ends, column, nothing, digits)


def at(run: Run, iteration: float, column: str) -> float:
    """A curve's value at an iteration, smoothed like the training loss and interpolated between rows."""
    return float(np.interp(iteration, run.column("step"), smoothed(run, column)))


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


def seconds_per_step(run: Run) -> float:
    """Seconds per step: the median over the stretches between evaluations, which short disturbances do not change."""
    return float(np.median(_paces(run)))


def undisturbed_seconds_per_step(run: Run) -> float:
    """Seconds per step in the fastest stretch: other work on the machine makes a step longer, never shorter.

    Not in the first stretch, since a process's first step is not timed.
    """
    return float(np.min(_paces(run)[1:], initial=math.inf))


def _paces(run: Run) -> np.ndarray:
    """Seconds per step, in each stretch between evaluations."""
    paces: np.ndarray = np.diff(run.column("seconds")) / np.diff(run.column("step"))
    return paces


def when(run: Run, target: float, of: str) -> float:
    """When a run reaches a target; infinite if never. A run that diverged counts as never, even if it got there before.

    Seconds are iterations times the seconds per step: the clock of a long run also counts interruptions.
    """
    iterations = None if run.status == "diverged" or math.isinf(target) else reached(run, target)
    if iterations is None:
        return math.inf
    return iterations * seconds_per_step(run) if of == "seconds" else iterations


def by_step(runs: Iterable[Run], values: Callable[[Run], np.ndarray]) -> dict[int, list[Any]]:
    """By iteration, the values of all runs that got that far."""
    pairs = [(run.column("step"), values(run)) for run in runs]
    if not pairs:
        return {}
    steps, those = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    there = np.isfinite(those).reshape(len(those), -1).all(axis=1)
    steps, those = steps[there], those[there]
    order = np.argsort(steps, kind="stable")
    found, first = np.unique(steps[order], return_index=True)
    return dict(zip(found.astype(int).tolist(), map(list, np.split(those[order], first[1:])), strict=False))


def before_divergence(run: Run, column: str) -> np.ndarray:
    """A curve without the value at which its run was stopped for diverging, which would distort the mean."""
    values = run.column(column)
    return np.append(values[:-1], np.nan) if run.status == "diverged" else values


def over_seeds(runs: Iterable[Run], column: str) -> dict[int, Spread]:
    """A curve's mean and spread over seeds, by iteration."""
    values = by_step(runs, lambda run: before_divergence(run, column))
    return {step: spread(those) for step, those in values.items()}


def choose(losses: Mapping[Rate, float]) -> Rate:
    """The learning rate, or place in a grid of them, with the lowest loss; on a tie, the smaller one."""
    return min(losses, key=lambda rate: (losses[rate], rate))
