"""Registered experiments: how rows are tuned and judged is written down before the first run that is judged by it.

1. **Tuning.** Every row alike: its learning rate on a grid with a factor of two, until the best is not at an end of the
   grid; then its momentum among the values named, at that rate. All tuning runs have the full length, and what counts
   is the held-out loss at their last step, the mean over the seeds 100 and 101.
2. **Judging.** Seeds 0, 1, ... that no tuning saw. Rows with the same seed start from the same weights and see the same
   batches, so they are compared seed by seed: the mean difference of the held-out loss at the last step, with a 95 %
   interval from 10,000 resamples of the seeds. One row is ahead of another if the interval excludes zero.
3. **The claim** is that one row, the contender, is ahead of every rival. The contender is the row with CProp, and
   without knowledge of the run's end, that had the lowest loss in tuning. Every row without CProp is a rival, whether
   it knows the end or not.
4. Every row that was started is shown; a seed that diverged counts as infinitely high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final

from cprop_lab import Experiment, Variant
from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.experiments import selection
from cprop_lab.experiments.experiment import RunAll
from cprop_lab.experiments.plan import Plan
from cprop_lab.experiments.presets import Length, Preset
from cprop_lab.run.recipes import Setting
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["Registered", "doubled", "held_out"]

TUNING: Final = (100, 101)
"""Seeds of the tuning runs; none of them is judged."""

SHORTER: Final = 100
"""The smoke preset divides lengths by this."""


def held_out(run: Run) -> float:
    """A run's held-out loss at its last step; infinite if it diverged."""
    return math.inf if run.status == "diverged" else float(run.column("test_loss")[-1])


def doubled(guess: float, places: int) -> float:
    """The learning rate that many places from a guess, in factors of two.

    Example:
        >>> [doubled(0.001, k) for k in (-1, 0, 2)]
        [0.0005, 0.001, 0.004]
    """
    return float(f"{guess * 2.0**places:.12g}")


@dataclass(frozen=True)
class Tuned:
    """A row after its tuning.

    Args:
        variant: with the momentum that was best.
        lr: the learning rate that was best.
        loss: the held-out loss of both, the mean over the tuning seeds.
        runs: all runs that tuned it.
    """

    variant: Variant
    lr: float
    loss: float
    runs: Sequence[Run]


@dataclass(frozen=True)
class Registered(Experiment):
    """An experiment that is tuned and judged by this module's rules, whatever the preset; the smoke preset is shorter.

    Args:
        length: of its runs, tuning included.
        momenta: the setting that is tuned after the rate and the values tried, by the optimizer inside.
        judged: how many seeds are judged.
    """

    length: Length = field(default=Length(4_000, 10, 10_000))  # it is frozen
    momenta: Mapping[str, tuple[str, Sequence[Setting]]] = field(default_factory=dict)
    judged: int = 10

    def seeds(self, preset: Preset) -> range:
        """Those that are judged."""
        return range(2 if preset.name == "smoke" else self.judged)

    def specifications(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """Its judged runs, at the learning rates given or those that tuning starts from."""
        return super().specifications(self._at_its_length(preset), lrs)

    def plan(self, preset: Preset, select: bool | None = None) -> Plan:
        """Its runs, as far as they are known before; for the arguments see :meth:`run`."""
        preset = self._at_its_length(preset)
        guessed = {variant: Tuned(variant, variant.guess(), math.inf, ()) for variant in self.variants}
        first, most = (
            [
                one
                for variant, short in self._searches(preset).items()
                for one in selection.tried(short, variant.guess(), TUNING, places, doubled)
            ]
            for places in (selection.FIRST, selection.ALL)
        )
        then = [*self._momenta(preset, guessed).values(), self.specifications(preset, {})]
        return Plan(first, most, [one for runs in then for one in runs])

    def run(
        self,
        preset: Preset,
        run: RunAll,
        select: bool | None = None,
        begun: Callable[[dict[str, Any], list[Specification]], object] | None = None,
        progress: Progress = SILENT,
    ) -> dict[str, Any]:
        """Tune every row and run it on the seeds that are judged; see :meth:`Experiment.run`."""
        preset = self._at_its_length(preset)
        tuned = self._tune(preset, run, progress)
        finals = {
            row.label: [tuned[row].variant.specification(preset, tuned[row].lr, seed) for seed in self.seeds(preset)]
            for row in self.variants
        }
        tuning = {row.label: [one.run_id for one in tuned[row].runs] for row in self.variants}
        manifest = {
            **self.manifest(preset, {}),
            "reduced": preset.name == "smoke",
            "tuned": {row.label: _told(tuned[row]) for row in self.variants},
            "tuning": tuning,
        }
        everything = [one for runs in finals.values() for one in runs]
        if begun is not None:
            begun(manifest, everything)
        progress.phase("running the seeds that are judged")
        done = iter(run(everything))
        judged = {name: [next(done).run_id for _ in runs] for name, runs in finals.items()}
        ids = dict.fromkeys(name for runs in (*judged.values(), *tuning.values()) for name in runs)
        return {**manifest, "judged": judged, "runs": list(ids), "timings": []}

    def _at_its_length(self, preset: Preset) -> Preset:
        """The preset with the experiment's length, also for tuning."""
        one = self.length
        if preset.name == "smoke":
            one = replace(one, iterations=max(10, one.iterations // SHORTER), examples=100)
        one = replace(one, selection=one.iterations)
        return replace(preset, lengths={variant.workload: one for variant in self.variants})

    def _tune(self, preset: Preset, run: RunAll, progress: Progress) -> dict[Variant, Tuned]:
        """Each row with the rate, and then the momentum, of the lowest held-out loss."""
        later = sum(one.iterations for one in self.specifications(preset, {}))
        found = selection.select(
            dict(zip((row.label for row in self.variants), self._searches(preset).values(), strict=True)),
            run,
            {row.label: row.guess() for row in self.variants},
            TUNING,
            progress,
            later,
            held_out,
            doubled,
        )
        tuned = {}
        for row in self.variants:
            search = found[row.label]
            tuned[row] = Tuned(row, search.lr, min(search.losses.values()), search.runs)
        progress.phase("tuning momenta", later)
        others = self._momenta(preset, tuned)
        done = iter(run([one for runs in others.values() for one in runs]))
        for (row, other), runs in others.items():
            ended = [next(done) for _ in runs]
            loss, best = fmean(map(held_out, ended)), tuned[row]
            better = (other, loss) if loss < best.loss else (best.variant, best.loss)
            tuned[row] = Tuned(better[0], best.lr, better[1], [*best.runs, *ended])
        return tuned

    def _searches(self, preset: Preset) -> dict[Variant, Specification]:
        """By row, the run that is made at each rate."""
        return {row: row.specification(preset, row.guess(), selecting=True) for row in self.variants}

    def _momenta(
        self, preset: Preset, tuned: Mapping[Variant, Tuned]
    ) -> dict[tuple[Variant, Variant], list[Specification]]:
        """The runs of every row with every other momentum, at its best rate."""
        runs = {}
        for row in self.variants:
            name, values = self.momenta.get(row.optimizer_name.base, ("", ()))
            usual = {**row.optimizer_name.recipe.settings, **row.settings}.get(name)
            for value in values:
                if value != usual:
                    other = replace(row, settings={**row.settings, name: value})
                    lr = tuned[row].lr
                    runs[row, other] = [other.specification(preset, lr, seed, selecting=True) for seed in TUNING]
        return runs


def _told(tuned: Tuned) -> dict[str, Any]:
    """How a row was tuned, for its manifest."""
    return {
        "optimizer": tuned.variant.optimizer,
        "lr": tuned.lr,
        "settings": dict(tuned.variant.settings),
        "loss": tuned.loss,
    }
