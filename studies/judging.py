"""What registered runs say, by the rules of :mod:`studies.registered`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cprop_lab.analysis.intervals import Interval, difference
from cprop_lab.run.names import parse
from cprop_lab.store import Run
from studies.registered import held_out

__all__ = ["Verdict", "contender", "judge"]


class Verdict(NamedTuple):
    """The contender against one rival."""

    contender: str
    rival: str
    difference: Interval

    @property
    def ahead(self) -> bool:
        """Whether the contender is clearly lower."""
        return self.difference.below_zero


def contender(manifest: Mapping[str, Any]) -> str:
    """The row with CProp, without knowledge of the run's end, that had the lowest loss in tuning."""
    names = {title: parse(about["optimizer"]) for title, about in manifest["tuned"].items()}
    able: list[str] = [title for title, name in names.items() if name.cprop and not name.knows_horizon]
    return min(able, key=lambda title: float(manifest["tuned"][title]["loss"]))


def judge(manifest: Mapping[str, Any], runs: Mapping[str, Run]) -> list[Verdict]:
    """The contender against every row without CProp, seed by seed.

    Args:
        manifest: of a registered experiment.
        runs: its runs, by id.
    """
    losses = {
        title: [held_out(run) for run in sorted((runs[name] for name in ids), key=lambda run: run.specification.seed)]
        for title, ids in manifest["judged"].items()
    }
    ours = contender(manifest)
    rivals = [title for title, about in manifest["tuned"].items() if not parse(about["optimizer"]).cprop]
    return [Verdict(ours, rival, difference(losses[ours], losses[rival])) for rival in rivals]
