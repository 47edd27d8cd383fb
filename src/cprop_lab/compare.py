"""Does CProp help my training, and at which learning rate? Selection, comparison, and a verdict in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cprop_lab import learning_rate, optimizers
from cprop_lab.groups import judged_by
from cprop_lab.results import Run
from cprop_lab.specification import Specification
from cprop_lab.targets import Pair, pairs, spread

__all__ = ["Comparison", "compare", "verdict"]


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
    """
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
    missed = sum(math.isinf(share) for share in iterations)
    seeds = f"{len(iterations)} seed{'s' * (len(iterations) > 1)}"
    if missed:
        return (
            f"{name} does not help: {at}, {missed} of {seeds} never came to the training loss at which {plain} ends. "
            f"{generalisation(pair)}"
        )
    share, time = spread(iterations), spread(seconds)
    if len(iterations) == 1:
        judgement = "may help" if share.mean < 1 else "does not seem to help"
        sure = "with one seed there is no telling how sure that is; give --seeds 3"
    elif share.mean + share.margin < 1:
        judgement, sure = "helps", f"95 % interval {interval(share.mean, share.margin)}"
    elif share.mean - share.margin > 1:
        judgement, sure = "does not help", f"95 % interval {interval(share.mean, share.margin)}"
    else:
        judgement, sure = "makes no clear difference", f"95 % interval {interval(share.mean, share.margin)}"
    saved = 1 - share.mean
    words = f"saves {saved:.0%} of the iterations" if saved >= 0 else f"takes {-saved:.0%} more iterations"
    clock = 1 - time.mean
    clocked = f"saves {clock:.0%} of the time" if clock >= 0 else f"takes {-clock:.0%} more time"
    return (
        f"{name} {judgement}: {at} and over {seeds}, it {words} to the training loss at which {plain} ends ({sure}), "
        f"and {clocked} on this machine. {generalisation(pair)}"
    )


def interval(mean: float, margin: float) -> str:
    """What is saved, from and to."""
    return f"{1 - mean - margin:.0%} to {1 - mean + margin:.0%}"


def generalisation(pair: Pair) -> str:
    """What becomes of the test data: the other half of the answer."""
    column = judged_by(pair.plain)
    before, after = (spread([run.column(column)[-1] for run in runs]) for runs in (pair.plain, pair.scaled))
    name = {"test_loss": "test loss"}.get(column, f"test {column}")
    return f"At the end, {name} is {after} with CProp and {before} without."
