"""Each figure of the paper as a named experiment: which runs it takes, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from cprop.statistics import PREFIX
from cprop_lab import learning_rate, optimizers, scoreboard
from cprop_lab.experiments import rates
from cprop_lab.experiments.presets import PRESETS, Preset
from cprop_lab.progress import SILENT, Progress
from cprop_lab.results import Run
from cprop_lab.specification import Setting, Specification
from cprop_lab.targets import facet

__all__ = ["EXPERIMENTS", "PRESETS", "Experiment", "Preset", "Variant"]

Kind = Literal["curves", "histogram", "learning-rates", "scoreboard"]
RunAll = Callable[[list[Specification]], list[Run]]


@dataclass(frozen=True)
class Variant:
    """A curve of a figure: a run without its seed, length and learning rate.

    Args:
        workload: what is trained.
        optimizer: its name on the command line.
        batch_size: examples per step.
        settings: of the optimizer, besides its defaults.
        options: of the workload.
        places: how many places of the grid its learning rate lies above the selected one; negative if below.
    """

    workload: str
    optimizer: str
    batch_size: int = 32
    settings: Mapping[str, Setting] = field(default_factory=dict)
    options: Mapping[str, Setting] = field(default_factory=dict)
    places: int = 0

    def __hash__(self) -> int:
        details = (tuple(sorted(details.items())) for details in (self.settings, self.options))
        return hash((self.workload, self.optimizer, self.batch_size, self.places, *details))

    @property
    def base(self) -> str:
        """The optimizer without CProp, which decides the learning rate: CProp is not tuned (section 3).

        Nor are averaged weights, on which no step depends.
        """
        return str(optimizers.parse(self.optimizer)._replace(cprop=False, ema=False))

    def setting(self) -> Variant:
        """What a learning rate is selected for, whatever CProp's settings are and however steps are executed."""
        settings = {
            name: value for name, value in self.settings.items() if name != "fused" and not name.startswith(PREFIX)
        }
        return Variant(self.workload, self.base, self.batch_size, settings, self.options)

    def guess(self) -> float:
        """The paper's learning rate, or where the search for one starts."""
        return rates.rate(self.workload, optimizers.parse(self.optimizer).base, self.batch_size)

    def rate(self, selected: float) -> float:
        """Its learning rate, given the one selected for its setting."""
        return learning_rate.grid(selected, self.places)

    def specification(self, preset: Preset, lr: float, seed: int = 0, selecting: bool = False) -> Specification:
        """Its run at a preset's length."""
        length = preset.lengths[self.workload]
        settings = dict(self.settings)
        if optimizers.parse(self.optimizer).base == "adabound":
            # "AdaBound ... shares the final learning rate with SGD" (appendix E).
            settings.setdefault("final_lr", rates.rate(self.workload, "sgd", self.batch_size))
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
        return learning_rate.shortened(whole, length.selection) if selecting else whole

    def timing(self, preset: Preset, lr: float, seed: int = 0) -> Specification:
        """A short run that measures the seconds per step."""
        return scoreboard.timing(self.specification(preset, lr, seed), preset.lengths[self.workload].selection // 5)


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper.

    Args:
        name: on the command line.
        title: of the figure.
        figure: the paper's.
        claim: what the figure shows according to the paper, in its words; or why there is no such claim.
        variants: its curves.
        kind: how it is drawn.
        panels: which columns of the curves are drawn.
    """

    name: str
    title: str
    figure: str
    claim: str
    variants: Sequence[Variant]
    kind: Kind = "curves"
    panels: Sequence[str] = ("train_loss", "accuracy", "mean_scale")

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
        """Run it, and return what it consists of.

        Args:
            preset: how long to run.
            run: runs a set of runs.
            select: whether learning rates are selected; by default what the preset says.
            begun: called with what it consists of as soon as that is known, which may be hours before its end.
            progress: told which phase follows.

        Returns:
            What is stored about it: the identities of its runs, and what a reader should know.
        """
        settings = {variant.setting(): variant.guess() for variant in self.variants}
        if self.kind == "learning-rates" or (preset.select if select is None else select):
            selections = self.select(preset, run, progress)
            settings = {setting: selections[setting].lr for setting in settings}
        about = self._about(preset, settings)
        timings: list[Run] = []
        if self.kind == "learning-rates":
            runs = [one for selection in selections.values() for one in selection.runs]
        else:
            specifications = self.specifications(preset, settings)
            if begun is not None:
                begun(about, specifications)
            progress.phase("running the experiment", sum(one.iterations for one in self._timings(preset, settings)))
            runs = run(specifications)
        if self.kind == "scoreboard":
            progress.phase("timing steps")
            timings = run(self._timings(preset, settings))
        return {
            **about,
            "runs": [one.identity for one in runs],
            "timings": [one.identity for one in timings],
        }

    def _timings(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """The short runs of a scoreboard that time its steps, in turn; none of other experiments."""
        turns = range(scoreboard.TIMINGS if self.kind == "scoreboard" else 0)
        return [v.timing(preset, v.rate(lrs[v.setting()]), turn) for turn in turns for v in self.variants]

    def _about(self, preset: Preset, lrs: Mapping[Variant, float]) -> dict[str, Any]:
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
                f"{s.workload} {s.base}{facet(s.specification(preset, lr))}": lr for s, lr in lrs.items()
            },
        }

    def specifications(self, preset: Preset, lrs: Mapping[Variant, float]) -> list[Specification]:
        """Its runs at the learning rates given for each setting, or else at the paper's."""
        return [
            variant.specification(preset, variant.rate(lrs.get(variant.setting(), variant.guess())), seed)
            for variant in self.variants
            for seed in range(preset.seeds)
        ]

    def select(
        self, preset: Preset, run: RunAll, progress: Progress = SILENT
    ) -> dict[Variant, learning_rate.Selection]:
        """Select the learning rates of its plain optimizers."""
        lrs = {variant.setting(): variant.guess() for variant in self.variants}
        whole = (
            [] if self.kind == "learning-rates" else [*self.specifications(preset, lrs), *self._timings(preset, lrs)]
        )
        settings = {variant.setting() for variant in self.variants}
        ordered = sorted(settings, key=lambda s: (s.workload, s.base, s.batch_size, str(s.options)))
        found = learning_rate.select(
            {str(i): s.specification(preset, s.guess(), selecting=True) for i, s in enumerate(ordered)},
            run,
            {str(i): s.guess() for i, s in enumerate(ordered)},
            range(preset.seeds),
            progress,
            later=sum(one.iterations for one in whole),
        )
        return {s: found[str(i)] for i, s in enumerate(ordered)}


def _both(workload: str, *bases: str, **details: Any) -> list[Variant]:
    """Each optimizer without and with CProp."""
    return [Variant(workload, prefix + base, **details) for base in bases for prefix in ("", "cprop-")]


def _varied(workload: str, *bases: str, **settings: Sequence[Setting]) -> list[Variant]:
    """Each optimizer without CProp, and with it at each of a setting's values."""
    ((setting, values),) = settings.items()
    return [
        variant
        for base in bases
        for variant in [
            Variant(workload, base),
            *(Variant(workload, f"cprop-{base}", settings={setting: value}) for value in values),
        ]
    ]


PAPERS_FIVE: Final = ("sgd", "adam", "rmsprop", "amsgrad", "adabound")
OVERCONFIDENCE: Final = (1.0, 3.0, 5.0, 10.0)
HORIZONS: Final = (0.9, 0.99, 0.999, 0.9999)
STARTS: Final = (0, 100)
SHAPES: Final = ("root_of_s", "normal", "square_of_s", "fourth_power_of_s")
# "We start from c = 1, multiplicatively increase it by 3 until it gets worse": it chose 27, so one beyond.
ALTERNATIVE_OVERCONFIDENCE: Final = (1.0, 3.0, 9.0, 27.0, 81.0)

_IMPROVED: Final = "CProp-augmented optimizers improved over their unaugmented peers in all cases."

_FIGURES: Final = (
    Experiment(
        "fmnist-fc",
        "Fashion-MNIST, fully-connected network",
        "Figure 2",
        "CProp-augmented optimizers performed favorably in all settings.",
        _both("fmnist-fc", *PAPERS_FIVE),
    ),
    Experiment(
        "fmnist-cnn",
        "Fashion-MNIST, convolutional network",
        "Figure 9, batch size 32",
        "CProp-augmented optimizers performed favorably in all settings.",
        _both("fmnist-cnn", "sgd", "adam"),
    ),
    Experiment(
        "cifar100-vgg", "CIFAR-100, VGG11", "Figure 3", _IMPROVED, _both("cifar100-vgg", "sgd", "adam", "rmsprop")
    ),
    Experiment(
        "cifar100-resnet",
        "CIFAR-100, ResNet18",
        "Figure 4",
        _IMPROVED,
        _both("cifar100-resnet", "sgd", "adam", "rmsprop"),
    ),
    Experiment(
        "tiny-imagenet-vgg",
        "Tiny ImageNet, VGG16",
        "Figure 5",
        "CProp provides significant improvement over traditional SGD and Adam.",
        _both("tiny-imagenet-vgg", "sgd", "adam"),
    ),
    Experiment(
        "tiny-imagenet-resnet",
        "Tiny ImageNet, ResNet50",
        "Figure 6",
        "CProp provides significant improvement over traditional SGD and Adam.",
        _both("tiny-imagenet-resnet", "sgd", "adam"),
    ),
    Experiment(
        "ptb-lstm",
        "Penn Treebank, AWD-LSTM without dropout",
        "Figure 7, top",
        "We see large improvement over traditional optimizers when no dropout is applied.",
        _both("ptb-lstm", "sgd", "adam"),
    ),
    Experiment(
        "ptb-lstm-dropout",
        "Penn Treebank, AWD-LSTM with dropout",
        "Figure 7, bottom, and figure 12, right",
        "The result is a bit less dramatic with dropout where the gaps are narrower.",
        _both("ptb-lstm-dropout", "sgd", "adam"),
    ),
    Experiment(
        "batch-sizes",
        "Batch sizes from 4 to 64 (Fashion-MNIST, convolutional network)",
        "Figure 9",
        "CProp works well across batch sizes.",
        [v for size in (4, 8, 16, 32, 64) for v in _both("fmnist-cnn", "sgd", "adam", batch_size=size)],
        panels=("train_loss", "accuracy"),
    ),
    Experiment(
        "overconfidence",
        "Overconfidence c (Fashion-MNIST, convolutional network)",
        "Figure 11",
        "Larger c's trade off the training speed with generalization performance improving over a default c = 1.",
        _varied("fmnist-cnn", "sgd", "adam", cprop_c=OVERCONFIDENCE),
        panels=("train_loss", "test_loss", "accuracy"),
    ),
    Experiment(
        "dropout",
        "Channel-wise dropout 0.3 and none (Fashion-MNIST, convolutional network)",
        "Figure 12, left",
        "From unclear reasons, CProp seems to be less effective under the presence of strong dropout.",
        [
            *_both("fmnist-cnn", "sgd", "adam"),
            *_both("fmnist-cnn", "sgd", "adam", options={"dropout": 0.3}),
        ],
    ),
    Experiment(
        "scale-histogram",
        "The scale over time (Fashion-MNIST, convolutional network)",
        "Figure 8",
        "CProp tends to scale down most of the learning rates quickly while maintaining high learning rate for a small "
        "portion throughout the training.",
        [Variant("fmnist-cnn", "cprop-sgd"), Variant("fmnist-cnn", "cprop-adam")],
        kind="histogram",
        panels=("mean_scale",),
    ),
    Experiment(
        "alternatives",
        "Relative rate and moment rate (Fashion-MNIST, convolutional network)",
        "Figures 13 and 14",
        "Despite CProp not being tuned, it held a leading position while moment rate (with extensive tuning) came "
        "close to it.",
        [
            Variant("fmnist-cnn", "sgd"),
            Variant("fmnist-cnn", "cprop-sgd"),
            *(
                Variant("fmnist-cnn", "cprop-sgd", settings={"cprop_measure": measure, "cprop_c": c})
                for measure in ("relative_rate", "moment_rate")
                for c in ALTERNATIVE_OVERCONFIDENCE
            ),
        ],
        panels=("train_loss",),
    ),
    Experiment(
        "generalization",
        "Generalization on all data sets",
        "Figure 10",
        "Vanilla SGD seems to generalize best in most cases while being slower to train.",
        [
            variant
            for workload in (
                "fmnist-cnn",
                "cifar100-vgg",
                "cifar100-resnet",
                "tiny-imagenet-vgg",
                "tiny-imagenet-resnet",
                "ptb-lstm-dropout",
            )
            for variant in _both(workload, "sgd", "adam")
        ],
        panels=("accuracy", "test_loss"),
    ),
)

_BEYOND: Final = (
    Experiment(
        "horizon",
        "The horizon of CProp's averages (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's, which says of beta 0.999 that it worked well (section 3).",
        _varied("fmnist-fc", "sgd", "adam", cprop_beta=HORIZONS),
    ),
    Experiment(
        "overconfidence-lstm",
        "Overconfidence c (Penn Treebank, AWD-LSTM without dropout)",
        "beyond the paper",
        "No figure of the paper's, which varies c on a convolutional network; on the LSTM, c = 1 around Adam fails.",
        _varied("ptb-lstm", "adam", cprop_c=(1.0, 3.0)),
    ),
    Experiment(
        "layer-mean",
        "One scale a layer (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's: is it when and in which layers CProp slows down, or which parameters?",
        [
            variant
            for base in ("sgd", "adam")
            for variant in [
                *_both("fmnist-fc", base),
                Variant("fmnist-fc", f"cprop-{base}", settings={"cprop_measure": "layer_mean", "fused": False}),
            ]
        ],
    ),
    Experiment(
        "shape",
        "Powers of CProp's scale (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's: should the scale tell parameters apart more sharply, or less?",
        _varied("fmnist-fc", "sgd", "adam", cprop_measure=SHAPES),
    ),
    Experiment(
        "late-start",
        "CProp that watches first (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's, whose CProp scales from the first step on.",
        _varied("fmnist-fc", "sgd", "adam", cprop_start=STARTS),
    ),
    Experiment(
        "late-start-lstm",
        "CProp that watches first (Penn Treebank, AWD-LSTM without dropout)",
        "beyond the paper",
        "No figure of the paper's; on the LSTM, CProp around Adam fails in the first hundred steps.",
        _varied("ptb-lstm", "adam", cprop_start=STARTS),
    ),
    Experiment(
        "smaller-rates",
        "CProp against smaller learning rates (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's: a scale below one is also a smaller learning rate, and is that all?",
        [
            variant
            for base in ("sgd", "adam")
            for variant in [
                Variant("fmnist-fc", f"cprop-{base}"),
                *(Variant("fmnist-fc", base, places=-places) for places in range(3)),
            ]
        ],
    ),
)

_SELECTIONS: Final = tuple(
    Experiment(
        f"lr-selection-{workload}",
        f"Selection of learning rates: {workload}",
        f"Appendix E, figure {figure}",
        f"Chosen: {', '.join(f'{lr:g} for {optimizers.RECIPES[base].title}' for base, lr in chosen.items())}.",
        [Variant(workload, base) for base in chosen],
        kind="learning-rates",
        panels=("train_loss",),
    )
    for figure, (workload, chosen) in zip((15, 16, 17, 18, 19, 20, 21, 21), rates.PAPER.items(), strict=True)
)

_SCOREBOARDS: Final = tuple(
    Experiment(
        f"scoreboard-{workload}",
        f"Scoreboard: {title}",
        "beyond the paper",
        "No claim of the paper: CProp among the optimizers of today, under rules written down before the runs.",
        [Variant(workload, row, settings=scoreboard.settings(row)) for row in scoreboard.ROWS],
        kind="scoreboard",
    )
    for workload, title in (
        ("fmnist-fc", "Fashion-MNIST, fully-connected network"),
        ("fmnist-cnn", "Fashion-MNIST, convolutional network"),
        ("ptb-lstm", "Penn Treebank, AWD-LSTM without dropout"),
    )
)

EXPERIMENTS: Final[Mapping[str, Experiment]] = {e.name: e for e in (*_FIGURES, *_SELECTIONS, *_BEYOND, *_SCOREBOARDS)}
