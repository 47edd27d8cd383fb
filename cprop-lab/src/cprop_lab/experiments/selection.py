"""The paper's selection of learning rates (section 3 and appendix E), the same for every optimizer.

"We run experiments with a given learning rate for a short interval, 5,000 iterations, the best
learning rate is the one with lowest training loss at 5,000-th iteration. We search by
increasing/decreasing by a factor of 3 until the best is found."
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from cprop_lab.analysis.curves import choose, final_loss
from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["ALL", "FIRST", "Selection", "candidates", "grid", "select", "shortened", "tried"]

ITERATIONS: Final = 5_000
SEEDS: Final = (0, 1, 2)
STAGES: Final = 12
"""A search that is this many factors of three away from its guess has failed."""
FIRST: Final = (-1, 0, 1)
"""Places of the grid that every search tries."""
ALL: Final = (*FIRST, *range(2, STAGES + 1))
"""As many as a search tries at most: it goes on in one direction."""
USUAL_ROUNDS: Final = 3
"""Three rates around the guess, then mostly one more, twice."""


def grid(guess: float, places: int) -> float:
    """The learning rate that many places from a guess, in the paper's steps of 1, 3, 10, 30.

    Example:
        >>> [float(f"{grid(0.1, k):g}") for k in (-3, -2, -1, 0, 1, 2)]
        [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    """
    decades, three = divmod(places, 2)
    return float(f"{guess * 10.0**decades * 3**three:.12g}")


def candidates(guess: float, losses: Mapping[int, float]) -> list[int]:
    """Which places of the grid to try next, given the losses so far: none once the best is not at an end.

    Args:
        guess: where the search started.
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
        return list(FIRST)
    best = choose(losses)
    following = [place for place in (best - 1, best + 1) if place not in losses]
    # If all diverged there is no best yet: try smaller rates.
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


@dataclass(frozen=True)
class Selection:
    """The result of a search.

    Args:
        lr: the best learning rate.
        losses: the mean training loss of every learning rate that was tried.
        runs: the runs behind it.
    """

    lr: float
    losses: Mapping[float, float]
    runs: Sequence[Run]


def shortened(specification: Specification, iterations: int) -> Specification:
    """A shortened run for the selection of a learning rate, with the few evaluations it needs."""
    return specification.replace(iterations=iterations, evaluate_every=max(1, iterations // 10))


def tried(
    specification: Specification,
    guess: float,
    seeds: Iterable[int],
    places: Iterable[int] = FIRST,
    rate: Callable[[float, int], float] = grid,
) -> list[Specification]:
    """The runs of a search that tries some places of the grid; for the arguments see :func:`select`."""
    seeds = tuple(seeds)
    return [specification.replace(lr=rate(guess, place), seed=seed) for place in places for seed in seeds]


def select(
    specifications: Mapping[str, Specification],
    run: Callable[[list[Specification]], list[Run]],
    guesses: Mapping[str, float],
    seeds: Iterable[int] = SEEDS,
    progress: Progress = SILENT,
    later: int = 0,
    loss: Callable[[Run], float] = final_loss,
    rate: Callable[[float, int], float] = grid,
) -> dict[str, Selection]:
    """Select the learning rates of several optimizers at once: each round is one set of runs for all still searching.

    Args:
        specifications: by any name, a run whose learning rate and seed are replaced.
        run: executes a set of runs.
        guesses: by the same name, where to start.
        seeds: a learning rate's loss is the mean over these.
        progress: told which round of runs follows.
        later: iterations that follow after the selection, for the estimate of the time left.
        loss: of a run, by which rates are chosen.
        rate: the learning rate so many places from a guess.
    """
    seeds = tuple(seeds)
    losses: dict[str, dict[int, float]] = {name: {} for name in specifications}
    kept: dict[str, list[Run]] = {name: [] for name in specifications}
    for stage in itertools.count(1):
        wanted = {
            (name, place): tried(specification, guesses[name], seeds, [place], rate)
            for name, specification in specifications.items()
            for place in candidates(guesses[name], losses[name])
        }
        if not wanted:
            break
        searching = [specifications[name].iterations for name in dict.fromkeys(name for name, _ in wanted)]
        more = max(0, USUAL_ROUNDS - stage) * len(seeds) * sum(searching)
        usual = max(USUAL_ROUNDS, stage)
        progress.phase(f"selecting learning rates, round {stage} of about {usual}", more + later)
        runs = iter(run([specification for group in wanted.values() for specification in group]))
        for (name, place), group in wanted.items():
            done = [next(runs) for _ in group]
            losses[name][place] = fmean(map(loss, done))
            kept[name] += done
    return {
        name: Selection(
            rate(guesses[name], choose(found)),
            {rate(guesses[name], place): found[place] for place in sorted(found)},
            kept[name],
        )
        for name, found in losses.items()
    }
