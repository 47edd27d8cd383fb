"""What a command costs, at least and at most, and how much of that is finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from itertools import starmap
from operator import sub
from typing import Any, NamedTuple

from cprop_lab.experiments.plan import Plan, by_id
from cprop_lab.run.cost import Cost, estimate
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run, Store

__all__ = ["Bounds", "costs"]


class Bounds(NamedTuple):
    """The least and the most that something may cost."""

    least: Cost
    most: Cost


class _UnfinishedError(Exception):
    """A set of runs is not finished."""


def costs(
    plan: Plan,
    protocol: Callable[[Callable[[list[Specification]], list[Run]]], object],
    store: Store,
    eager: bool = False,
) -> tuple[Bounds, Bounds]:
    """The cost of a command, and of what is still to be run for it.

    Args:
        plan: its runs.
        protocol: executes the command, given what runs a set of runs. It is followed as far as its runs are finished.
        store: holds finished runs.
        eager: whether no compiled steps are used, which makes other runs of them.
    """
    if eager:
        plan = plan.eager()
    finished = store.finished()
    asked: dict[str, Specification] = {}
    missing: dict[str, Specification] = {}

    def run(specifications: list[Specification]) -> list[Run]:
        wanted = by_id(map(Specification.eager, specifications) if eager else specifications)
        asked.update(wanted)
        runs, known = [], finished
        if finished >= wanted.keys():
            runs = store.runs(wanted)
            known = {one.run_id for one in runs}  # without those that are damaged
        missing.update((name, one) for name, one in wanted.items() if name not in known)
        if missing:
            raise _UnfinishedError
        return runs

    try:
        protocol(run)
    except _UnfinishedError:
        tried = by_id(plan.all)
        if not missing.keys() & tried.keys():  # the searches are over
            searched = [one for name, one in asked.items() if name in tried]
            plan = Plan(searched, searched, plan.then, plan.perhaps)
    else:
        plan = Plan(then=list(asked.values()))
    least, most = estimate(plan.least), estimate(plan.most)
    done = estimate(one for name, one in asked.items() if name not in missing)
    # What is finished besides may be of this command: it is not known which learning rates are found.
    to_run = estimate(missing.values()) if finished or not missing else least
    return Bounds(least, most), Bounds(to_run, _difference(most, done))


def _difference(one: Cost, other: Cost) -> Cost:
    parts: tuple[Any, ...] = tuple(starmap(sub, zip(astuple(one), astuple(other), strict=True)))
    return Cost(*parts)
