"""Which runs belong together, their names, and statistics over seeds: shared by figures and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from cprop_lab import optimizers
from cprop_lab.results import METRICS, Run, Status, measured
from cprop_lab.specification import Specification
from cprop_lab.targets import Spread, by_seed, facet, spread

__all__ = [
    "WORDS",
    "Family",
    "Kin",
    "before_divergence",
    "by_place",
    "by_step",
    "grouped",
    "judged_by",
    "kin",
    "metric",
    "names",
    "over_seeds",
    "place",
    "with_status",
]

WORDS: Final[Mapping[str, str]] = {
    "step": "iterations",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "accuracy": "test accuracy",
    "perplexity": "test perplexity",
    "mean_scale": "mean scale",
    "lr": "learning rate",
}


def place(specification: Specification) -> str:
    """Where an optimizer was tried: the workload, and what distinguishes it from others of its experiment."""
    return f"{specification.workload}{facet(specification)}"


class Family(NamedTuple):
    """What shares a colour: an optimizer without and with CProp."""

    base: str
    cosine: bool
    ema: bool
    measure: str


class Kin(NamedTuple):
    """The members of a family with CProp, or those without."""

    family: Family
    cprop: bool


def kin(specification: Specification) -> Kin:
    """The family of a run, and whether it has CProp."""
    name = optimizers.parse(specification.optimizer)
    measure = str(specification.settings.get("cprop_measure", "normal"))
    scaled = name.recipe.scales
    return Kin(Family(scaled or name.base, name.cosine, name.ema, measure), name.cprop or bool(scaled))


def grouped(runs: Iterable[Run]) -> dict[Specification, list[Run]]:
    """Groups of runs that differ only in their seed.

    Workloads and optimizers keep their order; an optimizer comes without CProp first, then with, by rising beta and c.
    """
    groups = by_seed(runs)
    places = list(dict.fromkeys(map(place, groups)))
    families = list(dict.fromkeys(kin(group).family for group in groups))

    def order(group: Specification) -> tuple[float, ...]:
        own = kin(group)
        turned = optimizers.knobs(group).values()
        return places.index(place(group)), families.index(own.family), own.cprop, *turned, group.lr

    return {group: groups[group] for group in sorted(groups, key=order)}


def names(groups: Iterable[Specification], but: Collection[str] = ()) -> dict[Specification, str]:
    """The name of each group in figures: the optimizer and, where that is ambiguous, whatever else differs.

    Args:
        groups: all that are shown together.
        but: settings that are shown elsewhere, and need not be in the name.
    """
    groups = list(groups)
    # c = 1 need not be said, except next to other values.
    seen: dict[tuple[str, Kin, str], set[float]] = {}
    for group in groups:
        for key, value in optimizers.knobs(group).items():
            seen.setdefault((place(group), kin(group), key), set()).add(value)
    alike: dict[tuple[str, str], list[Specification]] = {}
    for group in groups:
        label = optimizers.label(group)
        for key, value in optimizers.knobs(group).items():
            if value == optimizers.CPROP_DEFAULTS[key] and len(seen[place(group), kin(group), key]) > 1:
                label += f", {optimizers.KNOBS[key]} = {value:g}"
        alike.setdefault((place(group), label), []).append(group)
    named = {}
    for (_, label), same in alike.items():
        values = [_values(group) for group in same]
        differing = [key for key in values[0] if key not in but and len({own.get(key) for own in values}) > 1]
        for group, own in zip(same, values, strict=True):
            named[group] = ", ".join([label, *(f"{WORDS.get(key, key)} {_text(own.get(key))}" for key in differing)])
    return {group: named[group] for group in groups}


def _values(specification: Specification) -> dict[str, Any]:
    """Everything that determines a run, in one flat dictionary."""
    values = specification.to_dict()
    return {**values.pop("options"), **values.pop("settings"), **values}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def by_place(groups: Iterable[Specification]) -> dict[str, list[Specification]]:
    """Groups by workload, options and batch size."""
    groups = list(groups)
    several = len({group.batch_size for group in groups}) > 1
    places: dict[str, list[Specification]] = {}
    for group in groups:
        where, size = place(group), f"batch size {group.batch_size}"
        if several and size not in where:  # the usual one is only said next to others
            where = f"{where[:-1]}, {size})" if facet(group) else f"{where} ({size})"
        places.setdefault(where, []).append(group)
    return places


# Numbers over seeds.


def by_step(runs: Iterable[Run], values: Callable[[Run], np.ndarray]) -> dict[int, list[Any]]:
    """By iteration, the values of all runs that got that far."""
    found: dict[int, list[Any]] = {}
    for run in runs:
        for step, value in zip(run.column("step"), values(run), strict=True):
            if np.isfinite(value).all():
                found.setdefault(int(step), []).append(value)
    return dict(sorted(found.items()))


def before_divergence(run: Run, column: str) -> np.ndarray:
    """A curve without the value at which its run was stopped for diverging, which would distort the mean."""
    values = run.column(column)
    return np.append(values[:-1], np.nan) if run.status == "diverged" else values


def over_seeds(runs: Iterable[Run], column: str) -> dict[int, Spread]:
    """A curve's mean and spread over seeds, by iteration."""
    values = by_step(runs, lambda run: before_divergence(run, column))
    return {step: spread(those) for step, those in values.items()}


def metric(runs: Sequence[Run]) -> str:
    """Which of accuracy and perplexity these runs measured."""
    return next((column for column in METRICS if measured(runs, column)), METRICS[0])


def judged_by(runs: Sequence[Run]) -> str:
    """The column that shows generalisation: accuracy or perplexity, or else the test loss."""
    found = metric(runs)
    return found if measured(runs, found) else "test_loss"


def with_status(runs: Iterable[Run], status: Status) -> list[Run]:
    """The runs that ended with this status."""
    return [run for run in runs if run.status == status]
