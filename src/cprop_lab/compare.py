"""Does CProp help my training, and at which learning rate? Selection, comparison, and a verdict in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cprop_lab import learning_rate, optimizers
from cprop_lab.groups import WORDS, judged_by
from cprop_lab.results import Run
from cprop_lab.specification import Specification
from cprop_lab.targets import Pair, Spread, as_measured, ended, pairs, spread

__all__ = ["Comparison", "compare", "verdict"]

HELPS: Final = "helps"
NO_HELP: Final = "does not help"


@dataclass(frozen=True)
class Comparison:
    """What a comparison has found.

    Args:
        selections: the learning rates, by optimizer.
        runs: all runs at the selected learning rates.
        pairs: by optimizer, without and with CProp.
    """

    selections: Mapping[str, learning_rate.Selection]
    runs: Sequence[Run]
    pairs: Mapping[str, Pair]


def compare(
    specification: Specification,
    bases: Sequence[str],
    run: Callable[[list[Specification]], list[Run]],
    seeds: int = 3,
    selection_iterations: int = learning_rate.ITERATIONS,
) -> Comparison:
    """Select a learning rate for each plain optimizer, then run each without and with CProp at that rate.

    CProp is given the plain optimizer's learning rate, as in the paper: what it saves, it saves without being tuned.

    Args:
        specification: the run to compare on; its optimizer, learning rate and seed are set here.
        bases: names of optimizers.
        run: runs a set of runs.
        seeds: how many.
        selection_iterations: how long a run is that serves to select; at most as long as the comparison's.

    Raises:
        ValueError: if there is no such optimizer, or CProp cannot be put around it; before anything is run.
    """
    for base in bases:
        if optimizers.parse(base).cprop:
            raise ValueError(
                f"{base} has CProp already: name the optimizer alone, and it is run without and with CProp"
            )
        optimizers.parse(f"cprop-{base}")
    short = min(selection_iterations, specification.iterations)
    plain = {base: specification.but(optimizer=str(optimizers.parse(base))) for base in bases}
    selections = learning_rate.select(
        {base: learning_rate.shortened(one, short) for base, one in plain.items()},
        run,
        {base: optimizers.parse(base).recipe.guess for base in bases},
        range(seeds),
    )
    runs = run(
        [
            one.but(optimizer=prefix + one.optimizer, lr=selections[base].lr, seed=seed)
            for base, one in plain.items()
            for prefix in ("", "cprop-")
            for seed in range(seeds)
        ]
    )
    return Comparison(selections, runs, pairs(runs))


def verdict(name: str, pair: Pair) -> str:
    """Whether CProp helps, by how much, and how sure that is: the 95 % interval of the mean over seeds.

    Args:
        name: of the optimizer with CProp.
        pair: its runs without and with it.
    """
    plain = optimizers.label(pair.plain[0].specification)
    at = f"at learning rate {pair.plain[0].specification.lr:g}"
    iterations, seconds = pair.shares("iterations"), pair.shares("seconds")
    if not iterations:
        return f"{name}: there is nothing to compare with, for {plain} {at} did not learn. Look at the task's loss."
    missed = sum(map(math.isinf, iterations))
    seeds = f"{len(iterations)} seed{'s' * (len(iterations) > 1)}"
    if missed:
        some = NO_HELP if missed == len(iterations) else "cannot be relied on"
        return (
            f"{name} {some}: {at}, {missed} of {seeds} never came to the training loss at which {plain} ends. "
            f"{generalisation(pair)}"
        )
    share, time = spread(iterations), spread(seconds)
    if len(iterations) == 1:
        judgement = "may help" if share.mean < 1 else "does not seem to help"
        alone = " With one seed there is no telling how sure that is; give --seeds 3."
    else:
        judgement, alone = _judged(share), ""
        if judgement == HELPS and _judged(time) == NO_HELP:
            judgement = f"{HELPS} in iterations and not in time"
    return (
        f"{name} {judgement}: {at} and over {seeds}, to the training loss at which {plain} ends it "
        f"{_saved(share, 'iterations')}, and {_saved(time, 'time')} on this machine.{alone} {generalisation(pair)}"
    )


def _judged(share: Spread) -> str:
    """What the 95 % interval of a part that CProp needs leaves to say."""
    if share.mean + share.margin < 1:
        return HELPS
    return NO_HELP if share.mean - share.margin > 1 else "makes no clear difference"


def _saved(share: Spread, of: str) -> str:
    """What CProp saves, with its interval."""
    saved = 1 - share.mean
    words = f"saves {saved:.0%} of the {of}" if saved >= 0 else f"takes {-saved:.0%} more {of}"
    if math.isinf(share.margin):
        return words
    low, high = (round(abs(saved) + end, 2) + 0.0 for end in (-share.margin, share.margin))  # and no -0%
    return f"{words} (95 % interval {low:.0%} to {high:.0%})"


def generalisation(pair: Pair) -> str:
    """What becomes of the test data: the other half of the answer.

    A longer way down the training loss can be overfitting. So it is also told for where both are equally far, if every
    seed with CProp comes that far.
    """
    column = judged_by(pair.plain)
    after, before = (ended(runs, column, nothing="lost (diverged)") for runs in (pair.scaled, pair.plain))
    end = f"At the end, {WORDS[column]} is {after} with CProp and {before} without"
    there = [ours for _, ours in pair.there(column)]
    if len(there) < len(pair.learned):
        return f"{end}."
    return f"{end}; where CProp comes to the training loss of the one without, it is {as_measured(there, column)}."
