"""Does CProp help my training? Select learning rates, then run each optimizer without and with CProp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cprop_lab.analysis.pairs import Pair, pairs
from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.experiments import learning_rate
from cprop_lab.run.names import parse
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        selections: the learning rates found, by optimizer.
        runs: all runs at the selected learning rates.
        pairs: the runs of each optimizer without and with CProp.
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
    progress: Progress = SILENT,
) -> Comparison:
    """Select a learning rate for each plain optimizer, then run each without and with CProp at that rate.

    CProp uses the plain optimizer's learning rate, as in the paper: whatever it saves, it saves without tuning. A peer
    that CProp cannot wrap, such as Schedule-Free, is run as it is.

    Args:
        specification: the run to compare on; its optimizer, learning rate and seed are replaced.
        bases: names of optimizers, without CProp.
        run: executes a set of runs.
        seeds: number of seeds.
        selection_iterations: length of the runs that select a learning rate; at most that of the comparison's.
        progress: told which phase follows.

    Raises:
        ValueError: if an optimizer is unknown, or named with CProp; before anything is run.
    """
    names = {base: parse(base) for base in bases}
    for base, name in names.items():
        if name.cprop:
            raise ValueError(
                f"{base} already includes CProp: name the plain optimizer, and it is run both without and with CProp"
            )
    prefixes = {base: [""] if name.recipe.alone else ["", "cprop-"] for base, name in names.items()}
    short = min(selection_iterations, specification.iterations)
    plain = {base: specification.replace(optimizer=base) for base in names}
    selections = learning_rate.select(
        {base: learning_rate.shortened(one, short) for base, one in plain.items()},
        run,
        {base: name.recipe.guess for base, name in names.items()},
        range(seeds),
        progress,
        later=sum(map(len, prefixes.values())) * seeds * specification.iterations,
    )
    progress.phase("comparing without and with CProp")
    runs = run(
        [
            one.replace(optimizer=prefix + one.optimizer, lr=selections[base].lr, seed=seed)
            for base, one in plain.items()
            for prefix in prefixes[base]
            for seed in range(seeds)
        ]
    )
    return Comparison(selections, runs, pairs(runs))
