"""Which runs belong together, and their names: shared by figures, tables and pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cprop_lab.run.evaluation import METRICS, Status
from cprop_lab.run.names import CPROP_DEFAULTS, KNOBS
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run, measured

__all__ = [
    "WORDS",
    "Family",
    "Kin",
    "by_seed",
    "by_workload",
    "common_seeds",
    "grouped",
    "judged_by",
    "kin",
    "metric",
    "names",
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
    "weight_decay": "weight decay",
}


class Family(NamedTuple):
    """What shares a colour: an optimizer without and with CProp."""

    base: str
    schedule: str
    average: str
    measure: str


class Kin(NamedTuple):
    """The members of a family with CProp, or those without."""

    family: Family
    cprop: bool


def kin(specification: Specification) -> Kin:
    """The family of a run, and whether it has CProp."""
    name = specification.optimizer_name
    measure = str(specification.settings.get("cprop_measure", "normal"))
    scaled = name.recipe.scales
    return Kin(Family(scaled or name.base, name.schedule, name.average, measure), name.cprop or bool(scaled))


def by_seed(runs: Iterable[Run]) -> dict[Specification, list[Run]]:
    """Groups of runs that differ only in their seed, ordered by seed."""
    groups: dict[Specification, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.specification.seed):
        groups.setdefault(run.specification.group(), []).append(run)
    return groups


def common_seeds(runs: Iterable[Run], others: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Runs of two groups, seed by seed, for the seeds that both have."""
    one, other = ({run.specification.seed: run for run in group} for group in (runs, others))
    return [(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]


def grouped(runs: Iterable[Run]) -> dict[Specification, list[Run]]:
    """Groups of runs that differ only in their seed.

    Workloads and optimizers keep their order; an optimizer comes without CProp first, then with, by rising beta and c.
    """
    groups = by_seed(runs)
    labels = list(dict.fromkeys(group.workload_label for group in groups))
    families = list(dict.fromkeys(kin(group).family for group in groups))

    def order(group: Specification) -> tuple[float, ...]:
        own = kin(group)
        turned = group.knobs.values()
        return labels.index(group.workload_label), families.index(own.family), own.cprop, *turned, group.lr

    return {group: groups[group] for group in sorted(groups, key=order)}


def names(groups: Iterable[Specification], without: Collection[str] = ()) -> dict[Specification, str]:
    """The name of each group in figures: the optimizer and, where that is ambiguous, whatever else differs.

    Args:
        groups: all that are shown together.
        without: settings that are shown elsewhere, and need not be in the name.
    """
    groups = list(groups)
    # c = 1 need not be said, except next to other values.
    seen: dict[tuple[str, Kin, str], set[float]] = {}
    for group in groups:
        for key, value in group.knobs.items():
            seen.setdefault((group.workload_label, kin(group), key), set()).add(value)
    alike: dict[tuple[str, str], list[Specification]] = {}
    for group in groups:
        label = group.label
        for key, value in group.knobs.items():
            if value == CPROP_DEFAULTS[key] and len(seen[group.workload_label, kin(group), key]) > 1:
                label += f", {KNOBS[key]} = {value:g}"
        alike.setdefault((group.workload_label, label), []).append(group)
    named = {}
    for (_, label), same in alike.items():
        values = [_values(group) for group in same]
        differing = [key for key in values[0] if key not in without and len({own.get(key) for own in values}) > 1]
        for group, own in zip(same, values, strict=True):
            named[group] = ", ".join([label, *(f"{WORDS.get(key, key)} {_text(own.get(key))}" for key in differing)])
    return {group: named[group] for group in groups}


def _values(specification: Specification) -> dict[str, Any]:
    """Everything that determines a run, in one flat dictionary."""
    values = specification.to_dict()
    return {**values.pop("options"), **values.pop("settings"), **values}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def by_workload(groups: Iterable[Specification]) -> dict[str, list[Specification]]:
    """Groups by workload, options and batch size."""
    groups = list(groups)
    several = len({group.batch_size for group in groups}) > 1
    places: dict[str, list[Specification]] = {}
    for group in groups:
        where, size = group.workload_label, f"batch size {group.batch_size}"
        if several and size not in where:  # the usual one is only said next to others
            where = f"{where[:-1]}, {size})" if group.facet else f"{where} ({size})"
        places.setdefault(where, []).append(group)
    return places


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
