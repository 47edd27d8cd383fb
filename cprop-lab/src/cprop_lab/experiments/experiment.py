"""An experiment: which runs it takes, their learning rates, and what is stored about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from cprop_lab.engine.progress import SILENT, Progress
from cprop_lab.experiments import rates, selection
from cprop_lab.experiments.plan import Plan
from cprop_lab.experiments.presets import Preset
from cprop_lab.run.names import CPROP_DEFAULTS, FLAGS, OptimizerName, parse
from cprop_lab.run.recipes import Setting
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run

__all__ = ["Experiment", "RunAll", "Variant"]

FigureKind = Literal["curves", "histogram", "learning-rates", "rates", "scoreboard"]


RunAll = Callable[[list[Specification]], list[Run]]


@dataclass(frozen=True)
class Variant:
    """One curve of a figure: a run without its seed, length and learning rate.

    Args:
        workload: what is trained.
        optimizer: its name on the command line.
        batch_size: examples per step.
        settings: of the optimizer, besides its defaults.
        options: of the workload.
        places: how many places of the grid its learning rate lies above the selected one; negative if below.
        own_rate: whether a learning rate is selected for it as it is, and not for the optimizer inside.
        lr: its learning rate, if none is selected for it.
        eps: CProp's epsilon, unless it is the library's default or one of the settings; it is in no name or title.
    """

    workload: str
    optimizer: str
    batch_size: int = 32
    settings: Mapping[str, Setting] = field(default_factory=dict)
    options: Mapping[str, Setting] = field(default_factory=dict)
    places: int = 0
    own_rate: bool = False
    lr: float | None = None
    eps: float | None = None

    def __hash__(self) -> int:
        details = (tuple(sorted(details.items())) for details in (self.settings, self.options))
        return hash((self.workload, self.optimizer, self.batch_size, self.places, self.own_rate, self.lr, *details))

    @cached_property
    def optimizer_name(self) -> OptimizerName:
        """The optimizer's name, taken apart once."""
        return parse(self.optimizer)

    @property
    def label(self) -> str:
        """What tables call it, the same on every workload."""
        return Specification(self.workload, self.optimizer, lr=1.0, settings=self.settings).label

    @property
    def base(self) -> str:
        """The optimizer without CProp, which decides the learning rate: CProp is not tuned (section 3).

        Nor are averaged weights, on which no step depends.
        """
        return self.optimizer_name.tuned

    def setting(self) -> Variant:
        """What a learning rate is selected for: without CProp's settings, and however steps are executed.

        With a rate of its own, it is selected for the variant as it is.
        """
        omitted = () if self.own_rate else (*FLAGS, *CPROP_DEFAULTS)
        settings = {k: v for k, v in self.settings.items() if k not in omitted}
        optimizer = self.optimizer if self.own_rate else self.base
        alone = Variant(self.workload, optimizer, self.batch_size, settings, self.options, own_rate=self.own_rate)
        return replace(alone, eps=self.eps if self.own_rate else None)

    def guess(self) -> float:
        """The paper's learning rate, or where the search for one starts."""
        return rates.rate(self.workload, self.optimizer_name.base, self.batch_size)

    def rate(self, selected: float) -> float:
        """Its learning rate, given the one selected for its setting."""
        return selection.grid(selected, self.places) if self.lr is None else self.lr

    def specification(self, preset: Preset, lr: float, seed: int = 0, selecting: bool = False) -> Specification:
        """Its run at a preset's length."""
        length = preset.lengths[self.workload]
        settings = dict(self.settings)
        if self.optimizer_name.base == "adabound":
            # "AdaBound ... shares the final learning rate with SGD" (appendix E).
            settings.setdefault("final_lr", rates.rate(self.workload, "sgd", self.batch_size))
        if self.optimizer_name.cprop and self.eps is not None:
            settings.setdefault("cprop_eps", self.eps)
        whole = Specification(
            workload=self.workload,
            optimizer=self.optimizer,
            lr=lr,
            seed=seed,
            batch_size=self.batch_size,
            iterations=length.iterations,
            precision=length.precision,
            settings=settings,
            options=self.options,
            evaluate_every=max(1, length.iterations // length.evaluations),
            examples=length.examples,
        )
        return selection.shortened(whole, length.selection) if selecting else whole


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper.

    Args:
        name: on the command line.
        title: of the figure.
        figure: the paper's.
        claim: what the figure shows according to the paper, in its words; or why there is no such claim.
        variants: its curves.
        kind: how it is drawn; ``learning-rates`` are searched for, and ``rates`` are given.
        panels: which columns of the curves are drawn.
        first_seed: of its runs.
    """

    name: str
    title: str
    figure: str
    claim: str
    variants: Sequence[Variant]
    kind: FigureKind = "curves"
    panels: Sequence[str] = ("train_loss", "accuracy", "mean_scale")
    first_seed: int = 0

    def only(self, bases: Iterable[str]) -> Experiment:
        """The same experiment with some of its optimizers, each without and with CProp.

        Raises:
            ValueError: if it lacks one of them.
        """
        wanted = set(bases)
        kept = [variant for variant in self.variants if variant.base in wanted]
        if missing := wanted - {variant.base for variant in kept}:
            has = ", ".join(dict.fromkeys(variant.base for variant in self.variants))
            raise ValueError(f"{self.name} does not include {', '.join(sorted(missing))}: choose from {has}")
        return replace(self, variants=kept)

    def run(
        self,
        preset: Preset,
        run: RunAll,
        select: bool | None = None,
        begun: Callable[[dict[str, Any], list[Specification]], object] | None = None,
        progress: Progress = SILENT,
    ) -> dict[str, Any]:
        """Run it, and return its manifest.

        Args:
            preset: how long to run.
            run: runs a set of runs.
            select: whether learning rates are selected; by default what the preset says.
            begun: called with the manifest and the runs as soon as they are known, which may be hours before the end.
            progress: told which phase follows.

        Returns:
            Its manifest, which is stored: the ids of its runs, and what a reader should know.
        """
        settings = {variant.setting(): variant.guess() for variant in self.variants if variant.lr is None}
        if self.selects(preset, select):
            selections = self.select(preset, run, progress)
            settings = {setting: selections[setting].lr for setting in settings}
        manifest = self.manifest(preset, settings)
        if self.kind == "learning-rates":
            runs = [one for found in selections.values() for one in found.runs]
        else:
            specifications = self.specifications(preset, settings)
            if begun is not None:
                begun(manifest, specifications)
            progress.phase("running the experiment")
            runs = run(specifications)
        return {**manifest, "runs": [one.run_id for one in runs], "timings": []}

    def manifest(self, preset: Preset, lrs: Mapping[Variant, float]) -> dict[str, Any]:
        """What a reader should know, besides its runs."""
        return {
            "experiment": self.name,
            "title": self.title,
            "figure": self.figure,
            "claim": self.claim,
            "preset": preset.name,
            "reduced": any(preset.shorter(v.workload, self.kind == "learning-rates") for v in self.variants),
            "kind": self.kind,
            "panels": list(self.panels),
            "learning_rates": {
                " ".join([f"{s.workload} {s.optimizer}{s.specification(preset, lr).facet}", *_told(s)]): lr
                for s, lr in lrs.items()
            },
        }

    def specifications(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """Its runs at the learning rates given for each setting, or else at the paper's."""
        return [
            variant.specification(preset, variant.rate(lrs.get(variant.setting(), variant.guess())), seed)
            for variant in self.variants
            for seed in self.seeds(preset)
        ]

    def seeds(self, preset: Preset) -> range:
        """The seeds of its runs."""
        return range(self.first_seed, self.first_seed + preset.seeds)

    def planned(self, preset: Preset) -> list[Specification]:
        """Its runs, for an estimate of their cost; a search for learning rates is assumed to try five of them."""
        if self.kind != "learning-rates":
            return self.specifications(preset, {})
        return [
            variant.specification(preset, selection.grid(variant.guess(), place), seed, selecting=True)
            for variant in self.variants
            for place in range(-2, 3)
            for seed in self.seeds(preset)
        ]

    def selects(self, preset: Preset, select: bool | None = None) -> bool:
        """Whether learning rates are selected, and not given."""
        wanted = self.kind == "learning-rates" or (preset.select if select is None else select)
        return wanted and any(variant.lr is None for variant in self.variants)

    def plan(self, preset: Preset, select: bool | None = None) -> Plan:
        """Its runs, as far as they are known before; for the arguments see :meth:`run`."""
        if not self.selects(preset, select):
            return Plan(then=self.after_selection(preset), perhaps=self.further(preset))
        first, possible = (
            [
                run
                for setting, short in self._searches(preset).items()
                for run in selection.tried(short, setting.guess(), self.selection_seeds(preset), places)
            ]
            for places in (selection.FIRST, selection.ALL)
        )
        return Plan(first, possible, self.after_selection(preset), self.further(preset))

    def further(self, preset: Preset) -> list[Specification]:
        """What is run besides, if results are too close."""
        return []

    def selection_seeds(self, preset: Preset) -> Iterable[int]:
        """The seeds of the runs that select learning rates."""
        return self.seeds(preset)

    def after_selection(self, preset: Preset) -> list[Specification]:
        """What is still to be run once learning rates are selected."""
        return [] if self.kind == "learning-rates" else self.specifications(preset, {})

    def select(self, preset: Preset, run: RunAll, progress: Progress = SILENT) -> dict[Variant, selection.Selection]:
        """Select the learning rates of its plain optimizers."""
        searches = self._searches(preset)
        found = selection.select(
            {str(i): short for i, short in enumerate(searches.values())},
            run,
            {str(i): setting.guess() for i, setting in enumerate(searches)},
            self.selection_seeds(preset),
            progress,
            later=sum(one.iterations for one in self.after_selection(preset)),
        )
        return {setting: found[str(i)] for i, setting in enumerate(searches)}

    def _searches(self, preset: Preset) -> dict[Variant, Specification]:
        """What learning rates are selected for, in the same order every time, and the run that is made at each rate."""
        settings = dict.fromkeys(variant.setting() for variant in self.variants)
        ordered = sorted(settings, key=lambda s: (s.workload, s.optimizer, s.batch_size, str(s.options)))
        return {setting: setting.specification(preset, setting.guess(), selecting=True) for setting in ordered}


def _told(setting: Variant) -> list[str]:
    """The settings that distinguish one with a learning rate of its own from others of its optimizer."""
    return [f"{name}={value}" for name, value in setting.settings.items()] if setting.own_rate else []
