"""The catalogue: each figure of the paper as a named experiment, and those beyond the paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from cprop_lab.experiments import rates, scoreboard
from cprop_lab.experiments.experiment import Experiment, Variant
from cprop_lab.experiments.scoreboard import Scoreboard
from cprop_lab.registry import Registry
from cprop_lab.run.names import PAPERS_EPS
from cprop_lab.run.recipes import RECIPES, Setting

__all__ = ["EXPERIMENTS", "WORKLOADS", "at_the_papers_eps", "register_experiment"]


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
FORMATS: Final = ("float32", "bfloat16")
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
    Experiment(
        "state-formats",
        "State in float32 and in bfloat16 (Fashion-MNIST, fully-connected network)",
        "beyond the paper",
        "No figure of the paper's: does CProp train as well if its state takes half of the memory?",
        _varied("fmnist-fc", "adam", cprop_state_dtype=FORMATS),
    ),
)

_SELECTIONS: Final = tuple(
    Experiment(
        f"lr-selection-{workload}",
        f"Selection of learning rates: {workload}",
        f"Appendix E, figure {figure}",
        f"Chosen: {', '.join(f'{lr:g} for {RECIPES[base].title}' for base, lr in chosen.items())}.",
        [Variant(workload, base) for base in chosen],
        kind="learning-rates",
        panels=("train_loss",),
    )
    for figure, (workload, chosen) in zip((15, 16, 17, 18, 19, 20, 21, 21), rates.PAPER.items(), strict=True)
)

WORKLOADS: Final[Sequence[tuple[str, str, int]]] = (
    ("fmnist-fc", "Fashion-MNIST, fully-connected network", 32),
    ("fmnist-cnn", "Fashion-MNIST, convolutional network", 32),
    ("ptb-lstm-small", "Penn Treebank, small LSTM", 16),
    ("ptb-transformer", "Penn Treebank, transformer on words", 16),
    ("ptb-gpt", "Penn Treebank, transformer on characters", 16),
)
"""The scoreboard's, with their titles and batch sizes."""

_SCOREBOARDS: Final = tuple(
    Scoreboard(
        f"scoreboard-{workload}" + f"-batch-{size}" * (size != batch_size),
        f"Scoreboard: {title}" + f", batch size {size}" * (size != batch_size),
        "beyond the paper",
        "No claim of the paper: CProp among the optimizers of today, under rules written down before the runs.",
        scoreboard.rows(workload, optimizers, size),
        kind="scoreboard",
    )
    for workload, title, batch_size in WORKLOADS
    for optimizers, size in [(scoreboard.OPTIMIZERS, batch_size), (scoreboard.TELLING, 4)]
    if size == batch_size or workload in ("ptb-transformer", "ptb-gpt")
)


def at_the_papers_eps(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Experiments made when the paper's epsilon was the library's default: with it, their runs keep their ids."""
    return [
        replace(experiment, variants=[replace(variant, eps=PAPERS_EPS) for variant in experiment.variants])
        for experiment in experiments
    ]


EXPERIMENTS: Final = Registry(
    "experiment", {e.name: e for e in at_the_papers_eps((*_FIGURES, *_SELECTIONS, *_BEYOND, *_SCOREBOARDS))}
)
"""All experiments: the laboratory's own, and those that modules of your own register."""


def register_experiment(experiment: Experiment) -> None:
    """Add an experiment of your own, for all commands that are given your module as ``--with MODULE``.

    Args:
        experiment: its name must not be taken.
    """
    EXPERIMENTS.add(experiment.name, experiment, version="", above=2)
