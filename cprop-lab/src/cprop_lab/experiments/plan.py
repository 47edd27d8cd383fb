"""Which runs a command takes, at least and at most: how far searches for learning rates go is not known before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification

__all__ = ["Plan", "by_id"]


@dataclass(frozen=True)
class Plan:
    """The runs of a command. Learning rates that are yet to be found are represented by the guesses they start from.

    Args:
        first: runs that are tried in any case, to find learning rates.
        all: all that may be tried, these included.
        then: runs at the learning rates that were found. Some may turn out to be the same.
        perhaps: further runs, if results are too close.
    """

    first: Sequence[Specification] = ()
    all: Sequence[Specification] = ()
    then: Sequence[Specification] = ()
    perhaps: Sequence[Specification] = ()

    def eager(self) -> Plan:
        """The same runs without compiled steps."""
        runs = (self.first, self.all, self.then, self.perhaps)
        return Plan(*([run.eager() for run in some] for some in runs))

    @property
    def least(self) -> list[Specification]:
        """The fewest runs."""
        return list(by_id([*self.first, *self.then]).values())

    @property
    def most(self) -> list[Specification]:
        """The most runs."""
        then = self.then if self.all else by_id(self.then).values()
        return [*by_id(self.all).values(), *then, *self.perhaps]


def by_id(runs: Iterable[Specification]) -> dict[str, Specification]:
    """Runs by their id: those that are the same, once."""
    return {run_id(run): run for run in runs}
