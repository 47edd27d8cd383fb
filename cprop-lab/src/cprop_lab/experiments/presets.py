"""How long experiments run: as in the paper, as two cores allow, or just long enough to check that everything works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cprop_lab.experiments.selection import ITERATIONS
from cprop_lab.run.specification import Precision

__all__ = ["PRESETS", "Length", "Preset"]


@dataclass(frozen=True)
class Length:
    """The length of one run.

    Args:
        iterations: number of steps.
        evaluations: number of rows of the curves.
        examples: per evaluation, of the training and of the test data; for a text, windows of 35 words.
        selection: steps of the runs that select a learning rate.
        precision: of the network; optimizers always compute in float32.
    """

    iterations: int
    evaluations: int
    examples: int
    selection: int = ITERATIONS
    precision: Precision = "float32"


@dataclass(frozen=True)
class Preset:
    """A length for every workload, and the number of seeds.

    Args:
        name: on the command line.
        about: a description of one line.
        seeds: number of seeds.
        select: whether learning rates are selected; otherwise the paper's are used.
        lengths: by workload.
    """

    name: str
    about: str
    seeds: int
    select: bool
    lengths: Mapping[str, Length]

    def shorter(self, workload: str, selecting: bool) -> bool:
        """Whether its runs are shorter or fewer than the paper's, if that has the workload."""
        ours = self.lengths[workload]
        theirs = PAPER.lengths.get(workload, ours)
        cut = ours.selection < theirs.selection if selecting else ours.iterations < theirs.iterations
        return cut or self.seeds < PAPER.seeds


# The paper's text does not say how long its runs were (only its figures' axes did). These lengths are our choice.
PAPER: Final = Preset(
    "paper",
    "as in the paper: three seeds and its learning rates; for GPUs",
    seeds=3,
    select=False,
    lengths={
        "fmnist-fc": Length(20_000, 100, 10_000),
        "fmnist-cnn": Length(20_000, 100, 10_000),
        "cifar100-vgg": Length(50_000, 100, 10_000),
        "cifar100-resnet": Length(50_000, 100, 10_000),
        # "We created a smaller subset of the train dataset containing 10,000 images" (section 3.3).
        "tiny-imagenet-vgg": Length(100_000, 100, 10_000),
        "tiny-imagenet-resnet": Length(100_000, 100, 10_000),
        "ptb-lstm": Length(40_000, 50, 10_000),
        "ptb-lstm-dropout": Length(40_000, 50, 10_000),
        # Beyond the paper.
        "ptb-lstm-small": Length(40_000, 50, 10_000, selection=10_000),
        "ptb-transformer": Length(40_000, 50, 10_000, selection=10_000),
        "ptb-gpt": Length(40_000, 50, 10_000, selection=10_000),
    },
)

REDUCED: Final = Preset(
    "reduced",
    "hours on two cores; learning rates selected by the laboratory",
    seeds=3,
    select=True,
    lengths={
        "fmnist-fc": Length(20_000, 50, 10_000),
        "fmnist-cnn": Length(10_000, 40, 2_000),
        "cifar100-vgg": Length(3_000, 20, 1_000, selection=300, precision="bfloat16"),
        "cifar100-resnet": Length(2_000, 10, 500, selection=150, precision="bfloat16"),
        "tiny-imagenet-vgg": Length(100, 5, 200, selection=20, precision="bfloat16"),
        "tiny-imagenet-resnet": Length(100, 5, 200, selection=20, precision="bfloat16"),
        "ptb-lstm": Length(1_500, 15, 40, selection=150, precision="bfloat16"),
        "ptb-lstm-dropout": Length(1_500, 15, 40, selection=150, precision="bfloat16"),
        "ptb-lstm-small": Length(1_200, 12, 20, selection=300),
        "ptb-transformer": Length(1_200, 12, 20, selection=300),
        "ptb-gpt": Length(1_600, 16, 20, selection=400),
    },
)

SMOKE: Final = Preset(
    "smoke",
    "minutes; checks that everything works and shows what it looks like, but says nothing about CProp",
    seeds=2,
    select=False,
    lengths={
        "fmnist-fc": Length(1_000, 20, 2_000, selection=200),
        "fmnist-cnn": Length(200, 10, 500, selection=50),
        "cifar100-vgg": Length(12, 3, 64, selection=4),
        "cifar100-resnet": Length(8, 2, 32, selection=4),
        "tiny-imagenet-vgg": Length(4, 2, 32, selection=2),
        "tiny-imagenet-resnet": Length(4, 2, 32, selection=2),
        "ptb-lstm": Length(6, 2, 2, selection=2),
        "ptb-lstm-dropout": Length(6, 2, 2, selection=2),
        "ptb-lstm-small": Length(12, 4, 2, selection=4),
        "ptb-transformer": Length(12, 4, 2, selection=4),
        "ptb-gpt": Length(24, 4, 2, selection=6),
    },
)

PRESETS: Final[Mapping[str, Preset]] = {preset.name: preset for preset in (PAPER, REDUCED, SMOKE)}
