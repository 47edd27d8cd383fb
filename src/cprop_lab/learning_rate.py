"""The paper's selection of learning rates (section 3 and appendix E), the same for every optimizer.

"We run experiments with a given learning rate for a short interval, 5,000 iterations, the best
learning rate is the one with lowest training loss at 5,000-th iteration. We search by
increasing/decreasing by a factor of 3 until the best is found."
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from cprop_lab.results import Run
from cprop_lab.specification import Specification

__all__ = ["WINDOW", "Selection", "candidates", "final_loss", "grid", "select", "shortened"]

ITERATIONS: Final = 5_000
SEEDS: Final = (0, 1, 2)
WINDOW: Final = 3
"""Rows of a curve that are averaged before it is compared: single ones jump about."""
STAGES: Final = 12
"""A search that has gone this many factors of three from its guess has lost its way."""


def grid(guess: float, places: int) -> float:
    """The learning rate some places from a guess, in the paper's steps of 1, 3, 10, 30.

    Example:
        >>> [float(f"{grid(0.1, k):g}") for k in (-3, -2, -1, 0, 1, 2)]
        [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    """
    decades, three = divmod(places, 2)
    return float(f"{guess * 10.0**decades * 3**three:.12g}")


def candidates(guess: float, losses: Mapping[int, float]) -> list[int]:
    """Which places of the grid to try next, given the losses at those tried: none, once the best is inside.

    Args:
        guess: where the search began.
        losses: the mean training loss by place; infinite where training diverged.

    Raises:
        ValueError: if the best is still at an end after :data:`STAGES` places.

    Example:
        >>> candidates(0.1, {})
        [-1, 0, 1]
        >>> candidates(0.1, {-1: 0.5, 0: 0.6, 1: 0.9})
        [-2]
        >>> candidates(0.1, {-2: 0.7, -1: 0.5, 0: 0.6, 1: 0.9})
        []
    """
    if not losses:
        return [-1, 0, 1]
    best = choose(losses)
    following = [place for place in (best - 1, best + 1) if place not in losses]
    # Where all diverged there is no best, and the way is down.
    if math.isinf(losses[best]):
        following = [min(losses) - 1]
    if any(abs(place) > STAGES for place in following):
        tried = f"from {grid(guess, min(losses)):g} to {grid(guess, max(losses)):g}"
        if math.isinf(losses[best]):
            raise ValueError(
                f"every learning rate {tried} gave NaN, or a loss that grew tenfold: look at the task's loss"
            )
        end = "lower" if best == min(losses) else "upper"
        raise ValueError(
            f"no best learning rate {tried}: the loss is lowest at the {end} end of the range; look at the task's loss"
        )
    return following


def choose(losses: Mapping[int, float]) -> int:
    """The place with the lowest loss; of equals the one with the smaller learning rate."""
    return min(losses, key=lambda place: (losses[place], place))


@dataclass(frozen=True)
class Selection:
    """What a search has found.

    Args:
        lr: the best learning rate.
        losses: all that were tried, with their mean training losses.
        runs: that it rests on.
    """

    lr: float
    losses: Mapping[float, float]
    runs: Sequence[Run]


def shortened(specification: Specification, iterations: int) -> Specification:
    """A run cut short to select a learning rate by, with the few rows that this takes."""
    return specification.but(iterations=iterations, evaluate_every=max(1, iterations // 10))


def final_loss(run: Run) -> float:
    """A run's training loss at its end, over the last few rows; infinite if it diverged."""
    losses = run.column("train_loss")[-WINDOW:]
    return math.inf if run.status == "diverged" else float(losses.mean())


def select(
    specifications: Mapping[str, Specification],
    run: Callable[[list[Specification]], list[Run]],
    guesses: Mapping[str, float],
    seeds: Iterable[int] = SEEDS,
) -> dict[str, Selection]:
    """Find the learning rate of several optimizers at once: each stage is one set of runs, of all that still search.

    Args:
        specifications: by any name, a run whose learning rate and seed are set here.
        run: runs a set.
        guesses: by the same name, where to begin.
        seeds: the loss of a learning rate is the mean over these.
    """
    seeds = tuple(seeds)
    losses: dict[str, dict[int, float]] = {name: {} for name in specifications}
    kept: dict[str, list[Run]] = {name: [] for name in specifications}
    while True:
        wanted = {
            (name, place): [specification.but(lr=grid(guesses[name], place), seed=seed) for seed in seeds]
            for name, specification in specifications.items()
            for place in candidates(guesses[name], losses[name])
        }
        if not wanted:
            break
        runs = iter(run([specification for group in wanted.values() for specification in group]))
        for (name, place), group in wanted.items():
            done = [next(runs) for _ in group]
            losses[name][place] = fmean(map(final_loss, done))
            kept[name] += done
    return {
        name: Selection(
            grid(guesses[name], choose(found)),
            {grid(guesses[name], place): found[place] for place in sorted(found)},
            kept[name],
        )
        for name, found in losses.items()
    }
