"""The scoreboard: which optimizers take part, how they are tuned, and how their steps are timed.

Its rules were written down before its runs (docs/results/scoreboard-rules.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from cprop_lab.analysis.curves import choose, final_loss
from cprop_lab.analysis.scoreboard import HORIZON, OF_ITS_OWN, undecided
from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.experiments.experiment import Experiment, RunAll, Variant
from cprop_lab.experiments.plan import Plan, by_id
from cprop_lab.experiments.presets import Preset
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["TIMINGS", "Scoreboard", "rows", "timing"]

OPTIMIZERS: Final = (
    *("sgd", "cprop-sgd", "adamw", "cprop-adamw", "adamw+average", "cprop-adamw+average"),
    *("adamw+cosine", "cprop-adamw+cosine", "adamw+wsd", "schedule-free-adamw", "gpa-adamw"),
    *("nadamw", "cprop-nadamw", "nadamw+cosine", "cautious-adamw", "ademamix"),
    *("muon", "cprop-muon", "muon+average", "cprop-muon+average", "muon+cosine", "soap"),
)

TELLING: Final = (
    *("adamw", "cprop-adamw", "adamw+average", "cprop-adamw+average", "adamw+cosine"),
    *("schedule-free-adamw", "ademamix", "muon", "cprop-muon"),
)
"""The rows of a workload's second batch size."""

OWN_RATE: Final = ("cprop-adamw", "cprop-muon")
"""These have a second row, for which learning rate and weight decay are selected as for every peer."""

TARGETS: Final = ("adamw", "adamw+cosine")
"""Whose final training losses are to be reached."""

SELECTION_SEEDS: Final = (100,)
"""None that is scored."""

WEIGHT_DECAYS: Final = (0.0, 0.01, 0.1)
"""For every optimizer that has one. The learning rate is selected at the first."""

FEWEST_SEEDS, MORE_SEEDS = 3, 2
"""Of every row, and those that are added where three cannot tell two rows apart."""

TIMINGS: Final = 3
"""Short runs of every row that measure the seconds per step, in turn; the fastest counts."""


def rows(workload: str, optimizers: Iterable[str] = OPTIMIZERS, batch_size: int = 32) -> list[Variant]:
    """The rows of a scoreboard."""
    return [
        Variant(workload, optimizer, batch_size, own_rate=own)
        for optimizer in optimizers
        for own in ([False, True] if optimizer in OWN_RATE else [False])
    ]


def timing(specification: Specification, iterations: int) -> Specification:
    """A short run that measures the seconds per step.

    Long runs share their machine with changing other work; short ones can be made in turn on an idle machine.
    """
    every = max(1, iterations // 10)
    # Evaluations only divide the run into stretches; for a text, an example is a window, and a hundred take minutes.
    few = max(1, min(100, specification.examples // 20))
    return specification.replace(iterations=max(10, iterations), evaluate_every=every, examples=few)


@dataclass(frozen=True)
class Scoreboard(Experiment):
    """An experiment whose rows are ranked, each tuned alike: its learning rate, then its weight decay.

    Args:
        first_timing: the seed of the first short run that measures seconds per step. Two scoreboards with rows in
            common need different ones, or the second reuses timings of the first, of another day or machine.
    """

    first_timing: int = 0

    def selection_seeds(self, preset: Preset) -> Iterable[int]:
        """One of its own, so that no row is scored on runs that it was tuned with."""
        return SELECTION_SEEDS

    def plan(self, preset: Preset, select: bool | None = None) -> Plan:
        """Its runs, as far as they are known before; see :meth:`Experiment.plan`."""
        preset = _quartered(preset)
        found = super().plan(preset, select)
        if not self.selects(preset, select):
            return found
        lrs = {variant.setting(): variant.guess() for variant in self.variants}
        tried, first = by_id(run for group in self._decays(preset, lrs).values() for run in group), by_id(found.first)
        decays = [run for name, run in tried.items() if name not in first]  # a search for learning rates has the first
        return replace(found, then=[*decays, *found.then])

    def further(self, preset: Preset) -> list[Specification]:
        """More seeds, if rows are too close."""
        enough = preset.seeds >= FEWEST_SEEDS
        return [one for variant in self.variants for one in self._added(variant, preset, {})] if enough else []

    def after_selection(self, preset: Preset) -> list[Specification]:
        """The runs of all rows, and those that time them."""
        return [*self.specifications(preset, {}), *self._shorter(preset, {}), *self._timings(preset, {})]

    def run(
        self,
        preset: Preset,
        run: RunAll,
        select: bool | None = None,
        begun: Callable[[dict[str, Any], list[Specification]], object] | None = None,
        progress: Progress = SILENT,
    ) -> dict[str, Any]:
        """Run it, and return its manifest; see :meth:`Experiment.run`."""
        preset = _quartered(preset)
        lrs = {variant.setting(): variant.guess() for variant in self.variants}
        tuned = self
        if self.selects(preset, select):
            lrs = {setting: selection.lr for setting, selection in self.select(preset, run, progress).items()}
            progress.phase("selecting weight decay", sum(one.iterations for one in self.after_selection(preset)))
            decays = self._select_decays(preset, lrs, run)
            tuned = replace(self, variants=[_decayed(variant, decays[variant.setting()]) for variant in self.variants])
            lrs = {_decayed(setting, decays[setting]): lr for setting, lr in lrs.items()}
        manifest = tuned.manifest(preset, lrs) | {"targets": list(TARGETS)}

        def run_once(specifications: Iterable[Specification]) -> dict[Specification, Run]:
            # A row's own learning rate may be the one that it had: then it has the same runs.
            once = list(dict.fromkeys(specifications))
            return dict(zip(once, run(once), strict=True))

        specifications = tuned.specifications(preset, lrs)
        if begun is not None:
            begun(manifest, specifications)
        shorter, timings = tuned._shorter(preset, lrs), tuned._timings(preset, lrs)
        later = sum(one.iterations for one in (*shorter, *timings))
        progress.phase("running the experiment", later)
        runs = run_once(specifications)
        if preset.seeds >= FEWEST_SEEDS:
            progress.phase("more seeds for rows that are close to each other", later)
            runs |= run_once(tuned._more_seeds(preset, lrs, runs))
        progress.phase("shorter runs of rows that know when they end", sum(one.iterations for one in timings))
        short = run_once(shorter)
        progress.phase("timing steps")
        timed = run_once(timings)
        return {
            **manifest,
            "runs": [one.run_id for one in (*runs.values(), *short.values())],
            "rows": _ids(tuned._rows(preset, lrs, runs)),
            "short": _ids(tuned._rows(preset, lrs, short)),
            "timings": [one.run_id for one in timed.values()],
        }

    def _select_decays(self, preset: Preset, lrs: Mapping[Variant, float], run: RunAll) -> dict[Variant, float | None]:
        """The weight decay with the lowest training loss at the selected learning rate; None without such a setting."""
        decays: dict[Variant, float | None] = {}
        tried = self._decays(preset, lrs)
        runs = iter(run([one for group in tried.values() for one in group]))
        losses: dict[Variant, dict[float, float]] = {}
        for (setting, decay), group in tried.items():
            losses.setdefault(setting, {})[decay] = fmean(final_loss(next(runs)) for _ in group)
        for setting in lrs:
            decays[setting] = choose(losses[setting]) if setting in losses else None
        return decays

    def _decays(self, preset: Preset, lrs: Mapping[Variant, float]) -> dict[tuple[Variant, float], list[Specification]]:
        """The runs that select a weight decay."""
        return {
            (setting, decay): [
                _decayed(setting, decay).specification(preset, lr, seed, selecting=True) for seed in SELECTION_SEEDS
            ]
            for setting, lr in lrs.items()
            for decay in WEIGHT_DECAYS
            if "weight_decay" in setting.optimizer_name.recipe.settings
        }

    def _full(self, variant: Variant, preset: Preset, lrs: Mapping[Variant, float]) -> Specification:
        """A row's run with the first seed."""
        return variant.specification(preset, variant.rate(lrs.get(variant.setting(), variant.guess())))

    def _rows(
        self, preset: Preset, lrs: Mapping[Variant, float], runs: Mapping[Specification, Run]
    ) -> dict[str, list[Run]]:
        """Runs by the row that they belong to, of whatever length."""
        found: dict[str, list[Run]] = {}
        for variant in self.variants:
            full = self._full(variant, preset, lrs)
            own = [run for one, run in runs.items() if one.replace(seed=0, iterations=full.iterations) == full]
            if own:
                found[_title(variant)] = own
        return found

    def _more_seeds(
        self, preset: Preset, lrs: Mapping[Variant, float], runs: Mapping[Specification, Run]
    ) -> list[Specification]:
        """Further seeds of the rows that those so far cannot tell apart."""
        pairs = [
            (_title(plain), _title(scaled))
            for plain in self.variants
            for scaled in self.variants
            if scaled.optimizer_name.cprop and scaled.optimizer_name.plain == plain.optimizer
        ]
        close = undecided(self._rows(preset, lrs, runs), pairs)
        return [
            one for variant in self.variants if _title(variant) in close for one in self._added(variant, preset, lrs)
        ]

    def _added(self, variant: Variant, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """A row's further seeds."""
        return [self._full(variant, preset, lrs).replace(seed=preset.seeds + more) for more in range(MORE_SEEDS)]

    def _shorter(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """Shorter runs of the rows that know when they end; of all others, the beginning of their run is the same."""
        full = [self._full(v, preset, lrs) for v in self.variants if v.optimizer_name.knows_horizon]
        return [
            one.replace(iterations=one.iterations // HORIZON, seed=seed) for one in full for seed in range(preset.seeds)
        ]

    def _timings(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """Short runs of every row, in turn."""
        full = [(self._full(v, preset, lrs), preset.lengths[v.workload].selection // 5) for v in self.variants]
        turns = range(self.first_timing, self.first_timing + TIMINGS)
        return [timing(one, iterations).replace(seed=turn) for turn in turns for one, iterations in full]


def _quartered(preset: Preset) -> Preset:
    """The same with selections a quarter as long as the runs."""
    quarter = {name: replace(one, selection=one.iterations // HORIZON) for name, one in preset.lengths.items()}
    return replace(preset, lengths=quarter)


def _title(variant: Variant) -> str:
    """A row's name, the same on every workload."""
    return variant.label + OF_ITS_OWN * variant.own_rate


def _decayed(variant: Variant, decay: float | None) -> Variant:
    """The same with a weight decay."""
    return variant if decay is None else replace(variant, settings={**variant.settings, "weight_decay": decay})


def _ids(rows: Mapping[str, list[Run]]) -> dict[str, list[str]]:
    return {title: [run.run_id for run in runs] for title, runs in rows.items()}
