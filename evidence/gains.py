"""The gain in one figure and one sentence: CProp's iterations relative to the plain optimizer's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

from cprop_lab.analysis.pairs import Pair, outcome, pairs
from cprop_lab.output.drawing import COLOURS, NARROW, STYLE, save
from cprop_lab.output.figures import BAR_ALPHA
from cprop_lab.output.tables import Table
from evidence import EVIDENCE, IMAGES, pages

PICTURE = IMAGES / "gains.png"
EXPERIMENTS = {
    "fmnist-fc": "Fashion-MNIST, fully connected",
    "fmnist-cnn": "Fashion-MNIST, convolutional",
    "dropout": "Fashion-MNIST, convolutional, dropout",
    "cifar100-vgg": "CIFAR-100, VGG11",
    "cifar100-resnet": "CIFAR-100, ResNet18",
    "tiny-imagenet-vgg": "Tiny ImageNet, VGG16",
    "tiny-imagenet-resnet": "Tiny ImageNet, ResNet50",
    "ptb-lstm": "Penn Treebank, LSTM",
    "ptb-lstm-dropout": "Penn Treebank, LSTM, dropout",
}
"""All of the paper's tasks: those where CProp loses are drawn, and counted in the sentence, like the others."""

CLAIMS = {
    "fmnist-fc": "holds; also for RMSProp, AMSGrad and AdaBound",
    "fmnist-cnn": "holds",
    "dropout": "holds: a smaller gain",
    "cifar100-vgg": "same direction, two seeds",
    "cifar100-resnet": "same direction, one seed",
    "tiny-imagenet-vgg": "no result: too short",
    "tiny-imagenet-resnet": "no result: too short",
    "ptb-lstm": "SGD: same direction, one seed; Adam: fails",
    "ptb-lstm-dropout": "SGD: same direction, one seed; Adam: no difference",
}
"""What these runs say of the paper's claim."""


class Gain(NamedTuple):
    """An optimizer on a task.

    Args:
        optimizer: the optimizer without CProp.
        iterations: relative iterations, mean over seeds; infinite if the plain optimizer's final loss is not reached.
    """

    optimizer: str
    iterations: float


def compared(name: str) -> dict[str, Pair]:
    """SGD and Adam, without and with CProp; an experiment with dropout also has those without, which come first."""
    found = pairs(pages.kept(EVIDENCE)[name].runs)
    return {
        optimizer: [pair for label, pair in found.items() if label.startswith(f"CProp({optimizer})")][-1]
        for optimizer in ("SGD", "Adam")
    }


def gains(name: str) -> Iterator[Gain]:
    """The gains of SGD and Adam in an experiment."""
    for optimizer, pair in compared(name).items():
        yield Gain(optimizer, fmean(pair.shares("iterations")))


def seeds(name: str) -> int:
    """The number of seeds of an experiment."""
    return len(compared(name)["SGD"].plain)


def extent(name: str) -> str:
    """The size of an experiment."""
    (iterations,) = {run.specification.iterations for run in compared(name)["SGD"].plain}
    return f"{seeds(name)} seed{'s' * (seeds(name) > 1)}, {iterations:,} steps"


def table() -> str:
    """The figure as a table, with links to the pages, and what it says of the paper's claims."""
    rows = [
        [
            f"[{title}]({'tiny-imagenet' if name.startswith('tiny') else name}.md)",
            *(outcome(pair, "iterations") for pair in compared(name).values()),
            extent(name),
            CLAIMS[name],
        ]
        for name, title in EXPERIMENTS.items()
    ]
    return Table(["task", "SGD", "Adam", "size", "the paper's claim"], rows).markdown()


def sentence() -> str:
    """The message of the figure."""
    of_all = {title: dict(gains(name)) for name, title in EXPERIMENTS.items()}

    def reached(optimizer: str) -> str:
        shares = sorted(round(100 * own[optimizer]) for own in of_all.values() if math.isfinite(own[optimizer]))
        return f"{len(shares)} of {len(of_all)} tasks, in {shares[0]} to {shares[-1]} % of the iterations"

    missed = [title for title, own in of_all.items() if math.isinf(own["Adam"])]
    assert not any(math.isinf(own["SGD"]) for own in of_all.values())
    repeated = [name for name in EXPERIMENTS if seeds(name) > 2]
    assert all("Fashion" in EXPERIMENTS[name] for name in repeated)
    return (
        f"At the plain optimizer's own learning rate, CProp reached SGD's final training loss on {reached('SGD')}, and "
        f"Adam's on {reached('Adam')}. It never reached Adam's on {len(missed)}: {'; '.join(missed)}. Only "
        f"{len(repeated)} tasks, all on Fashion-MNIST, have three seeds and more than two epochs."
    )


@style.context({**STYLE, "font.size": 10, "axes.titlesize": 10.5}, after_reset=True)
def draw() -> None:
    """Draw the figure: narrow enough to fit on a phone."""
    figure = Figure(figsize=(NARROW, 8.8))
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    line = 0.0
    for name, title in EXPERIMENTS.items():
        axes.text(0.01, line, title, fontweight="bold", va="center", fontsize=9.5)
        axes.text(0.985, line, extent(name), color="0.3", va="center", ha="right", fontsize=9)
        for gain in gains(name):
            line += 1
            axes.text(-0.02, line, gain.optimizer, va="center", ha="right")
            if math.isinf(gain.iterations):
                axes.text(0.02, line, "Adam's final loss is never reached", va="center", color="0.3", fontsize=9)
                continue
            axes.barh(line, gain.iterations, 0.38, color=COLOURS[0], alpha=BAR_ALPHA, linewidth=0)
            axes.text(gain.iterations + 0.01, line, f"{gain.iterations:.2f}", va="center", fontsize=8.5)
        line += 1.25
    axes.set(xlim=(0, 1.05), ylim=(line - 0.6, -0.7), yticks=[])
    axes.set_xlabel("with CProp, relative to the plain optimizer (shorter is better)")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    figure.suptitle("Iterations to the plain optimizer's final training loss", fontsize=11)
    save(figure, PICTURE)
    pages.mark(PICTURE, digest())


def digest() -> str:
    """The data of the figure."""
    return pages.digest_of_several(pages.kept(EVIDENCE)[name] for name in EXPERIMENTS)
