"""Does CProp help my training? Select learning rates, then run each optimizer without and with CProp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cprop_lab.analysis.pairs import Pair, pairs
from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.experiments import selection
from cprop_lab.experiments.plan import Plan
from cprop_lab.run.names import parse
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["Comparison", "compare", "compared", "planned"]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        selections: the learning rates found, by optimizer.
        runs: all runs at the selected learning rates.
        pairs: the runs of each optimizer without and with CProp.
    """

    selections: Mapping[str, selection.Selection]
    runs: Sequence[Run]
    pairs: Mapping[str, Pair]

    @property
    def everything(self) -> list[Run]:
        """Also the runs that selected the learning rates."""
        return [*self.runs, *(run for found in self.selections.values() for run in found.runs)]


def compare(
    specification: Specification,
    bases: Sequence[str],
    run: Callable[[list[Specification]], list[Run]],
    seeds: int = 3,
    selection_iterations: int = selection.ITERATIONS,
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
    later = sum(one.iterations for one in compared(specification, bases, seeds))
    selections = selection.select(
        _short(specification, bases, selection_iterations),
        run,
        {base: parse(base).recipe.guess for base in bases},
        range(seeds),
        progress,
        later,
    )
    progress.phase("comparing without and with CProp")
    runs = run(compared(specification, bases, seeds, {base: found.lr for base, found in selections.items()}))
    return Comparison(selections, runs, pairs(runs))


def planned(
    specification: Specification,
    bases: Sequence[str],
    seeds: int = 3,
    selection_iterations: int = selection.ITERATIONS,
) -> Plan:
    """The runs of a comparison, as far as they are known before; for the arguments see :func:`compare`."""
    short = _short(specification, bases, selection_iterations)
    first, possible = (
        [
            run
            for base, one in short.items()
            for run in selection.tried(one, parse(base).recipe.guess, range(seeds), places)
        ]
        for places in (selection.FIRST, selection.ALL)
    )
    return Plan(first, possible, compared(specification, bases, seeds))


def _short(specification: Specification, bases: Iterable[str], iterations: int) -> dict[str, Specification]:
    """The run that selects a learning rate, by optimizer."""
    short = selection.shortened(specification, min(iterations, specification.iterations))
    return {base: short.replace(optimizer=base) for base in bases}


def compared(
    specification: Specification, bases: Iterable[str], seeds: int, lrs: Mapping[str, float] | None = None
) -> list[Specification]:
    """The runs of a comparison, at the given learning rates or where the search for them starts.

    Raises:
        ValueError: if an optimizer is unknown, or named with CProp.
    """
    runs = []
    for base in bases:
        name = parse(base)
        if name.cprop:
            raise ValueError(
                f"{base} already includes CProp: name the plain optimizer, and it is run both without and with CProp"
            )
        lr = (lrs or {}).get(base, name.recipe.guess)
        for optimizer in (base,) if name.recipe.alone else (base, f"cprop-{base}"):
            runs += [specification.replace(optimizer=optimizer, lr=lr, seed=seed) for seed in range(seeds)]
    return runs
