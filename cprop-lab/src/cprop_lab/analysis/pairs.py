"""Pairs: an optimizer without and with CProp, on the same seeds, and what CProp saves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cprop_lab.analysis.curves import at, final_loss, when
from cprop_lab.analysis.groups import by_seed, common_seeds
from cprop_lab.analysis.spread import spread
from cprop_lab.run.specification import Specification
from cprop_lab.store import Manifest, Run

__all__ = ["Pair", "outcome", "pairs", "pairs_of"]


MACHINE: Final = {
    "host": "the hosts",
    "cpu": "the processors",
    "device": "the devices",
    "threads": "the threads",
    "torch": "the builds of torch",
}
"""What must be the same for seconds to be compared, by its key in a run's provenance."""
BUSIER: Final = 1.1
"""Times as much CPU time per second as the other run had: beyond that, the machine was busy and not the run slow."""


@dataclass(frozen=True)
class Pair:
    """An optimizer without and with CProp, seed by seed: what CProp saves on the way to the plain one's final loss.

    Seeds that did not learn without CProp (they diverged, or ended no lower than they started) have no target and are
    left out.

    Args:
        plain: the runs without CProp, ordered by seed.
        scaled: the runs with CProp, in the same order.
    """

    plain: Sequence[Run]
    scaled: Sequence[Run]

    @classmethod
    def over_common_seeds(cls, plain: Iterable[Run], scaled: Iterable[Run]) -> Pair:
        """A pair of two groups of runs, of which one may have more seeds."""
        both = common_seeds(plain, scaled)
        return cls([without for without, _ in both], [with_cprop for _, with_cprop in both])

    @cached_property
    def learned(self) -> list[tuple[Run, Run, float]]:
        """The seeds that have a target: both runs, and the plain one's final training loss."""
        both = zip(self.plain, self.scaled, strict=True)
        found = [(plain, scaled, final_loss(plain)) for plain, scaled in both]
        return [(p, s, target) for p, s, target in found if 0 < when(p, target, "iterations") < math.inf]

    @property
    def targets(self) -> list[float]:
        """The final training loss without CProp, by seed."""
        return [target for *_, target in self.learned]

    def times(self, of: str) -> list[tuple[float, float]]:
        """By seed, when both runs reach the target, in ``"iterations"`` or ``"seconds"``; infinite if never."""
        return self._times[of]

    @cached_property
    def _times(self) -> dict[str, list[tuple[float, float]]]:
        return {
            of: [(when(plain, target, of), when(scaled, target, of)) for plain, scaled, target in self.learned]
            for of in ("iterations", "seconds")
        }

    def shares(self, of: str) -> list[float]:
        """By seed, CProp's iterations or seconds to the target divided by the plain run's; infinite if it misses."""
        return [ours / theirs for theirs, ours in self.times(of)]

    @cached_property
    def why_not_timed(self) -> str:
        """Why the seconds of a seed's two runs cannot be compared, in words; empty if they can, or nothing is known."""
        for plain, scaled, _ in self.learned:
            here, there = plain.provenance, scaled.provenance
            for key, words in MACHINE.items():
                if key in here and key in there and here[key] != there[key]:
                    return f"{words} differ ({here[key]} and {there[key]})"
            shares = [float(run.get("cpu_share") or math.nan) for run in (here, there)]
            if max(shares) > BUSIER * min(shares):
                return "one had more of the CPU than the other"  # said once, whatever the shares of each pair
        return ""

    def comparable(self, of: str) -> bool:
        """Whether the iterations, or the seconds, of both runs may be compared."""
        return of == "iterations" or not self.why_not_timed

    def there(self, column: str) -> list[tuple[float, float]]:
        """By seed, the value of another curve at the target, for both runs, if both reach it.

        At the end of their runs the one with CProp is further along; at the target both have the same training loss.
        """
        arrivals = zip(self.learned, self.times("iterations"), strict=True)
        return [
            (at(plain, theirs, column), at(scaled, ours, column))
            for (plain, scaled, _), (theirs, ours) in arrivals
            if math.isfinite(ours)
        ]


def outcome(pair: Pair, of: str) -> str:
    """The outcome of a pair in a few words: CProp's ratio, or how many seeds missed the target."""
    if not pair.comparable(of):
        return "no verdict on time"
    shares = pair.shares(of)
    missed = sum(map(math.isinf, shares))
    parts = []
    if missed:
        parts.append("not reached" + f" by {missed} of {len(shares)}" * (missed < len(shares)))
    elif shares:
        mean, deviation, _ = spread(shares)
        parts.append(f"{mean:.2f}" + f" ± {deviation:.2f}" * math.isfinite(deviation))
    if len(shares) < len(pair.plain):
        parts.append(f"{len(pair.plain) - len(shares)} of {len(pair.plain)} did not learn without CProp")
    return ", ".join(parts)


def _setting(specification: Specification) -> tuple[object, ...]:
    """What both runs of a pair have in common; learning rates may differ, if both were selected."""
    return (
        specification.workload,
        tuple(specification.options.items()),
        specification.batch_size,
        specification.iterations,
        specification.precision,
    )


def pairs(runs: Iterable[Run]) -> dict[str, Pair]:
    """All optimizers that ran without and with CProp, on the seeds of both, by the name figures use for the latter.

    If the plain one ran at several learning rates, CProp is paired with each.
    """
    groups = by_seed(runs)
    several = len({group.workload for group in groups}) > 1
    alike: dict[tuple[object, ...], list[Specification]] = {}
    for group in groups:
        alike.setdefault((group.optimizer, *_setting(group)), []).append(group)
    found = {}
    for scaled, with_cprop in groups.items():
        if not scaled.optimizer_name.cprop:
            continue
        plain = {
            group: pair
            for group in alike.get((scaled.optimizer_name.plain, *_setting(scaled)), ())
            if (pair := Pair.over_common_seeds(groups[group], with_cprop)).plain
        }
        name = f"{scaled.workload}: " * several + scaled.label + scaled.facet
        for group, pair in plain.items():
            against = f" against learning rate {group.lr:g}" * (len(plain) > 1)
            found[name + against] = pair
    return found


def pairs_of(manifest: Manifest, runs: Sequence[Run]) -> dict[str, Pair]:
    """An experiment's pairs; none where each optimizer is compared with itself, at other learning rates."""
    return {} if manifest["kind"] in ("learning-rates", "rates") else pairs(runs)
