"""The gain in one figure and one sentence: CProp's iterations relative to the plain optimizer's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

from cprop_lab.analysis.pairs import pairs
from cprop_lab.output.drawing import COLOURS, NARROW, STYLE, save
from cprop_lab.output.figures import BAR_ALPHA
from evidence import EVIDENCE, IMAGES, pages

PICTURE = IMAGES / "gains.png"
EXPERIMENTS = {
    "fmnist-fc": "Fashion-MNIST, fully connected",
    "fmnist-cnn": "Fashion-MNIST, convolutional",
    "cifar100-vgg": "CIFAR-100, VGG11",
    "cifar100-resnet": "CIFAR-100, ResNet18",
    "ptb-lstm": "Penn Treebank, LSTM",
}
BATCHES = {"fmnist": 60_000 / 32, "cifar100": 50_000 / 32, "ptb": 830}
"""Batches per epoch, by data set."""


class Gain(NamedTuple):
    """An optimizer on a task.

    Args:
        optimizer: the optimizer without CProp.
        iterations: relative iterations, mean over seeds; infinite if the plain optimizer's final loss is not reached.
    """

    optimizer: str
    iterations: float


def gains(name: str) -> Iterator[Gain]:
    """The gains of SGD and Adam in an experiment."""
    found = pairs(pages.kept(EVIDENCE)[name].runs)
    for optimizer in ("SGD", "Adam"):
        yield Gain(optimizer, fmean(found[f"CProp({optimizer})"].shares("iterations")))


def extent(name: str) -> str:
    """The size of an experiment."""
    runs = pages.kept(EVIDENCE)[name].runs
    seeds = len({run.specification.seed for run in runs})
    (iterations,) = {run.specification.iterations for run in runs}
    epochs = iterations / BATCHES[name.partition("-")[0]]
    return f"{seeds} seed{'s' * (seeds > 1)}, {epochs:.1f} epochs"


def sentence() -> str:
    """The message of the figure."""
    *images, text = (list(gains(name)) for name in EXPERIMENTS)
    sgd, adam = (sorted(round(100 * gain.iterations) for gain in both) for both in zip(*images, strict=True))
    lstm = {gain.optimizer: gain for gain in text}
    assert math.isinf(lstm["Adam"].iterations)
    return (
        f"On four image classifiers, CProp reached Adam's final training loss in {adam[0]} to {adam[-1]} % of the "
        f"iterations, and SGD's in {sgd[0]} to {sgd[-1]} %, at the plain optimizer's own learning rate. On an LSTM it "
        f"helped SGD ({100 * lstm['SGD'].iterations:.0f} %) and hurt Adam, whose final loss it never reached. Only the "
        f"Fashion-MNIST runs have three seeds and more than two epochs."
    )


@style.context({**STYLE, "font.size": 10, "axes.titlesize": 10.5}, after_reset=True)
def draw() -> None:
    """Draw the figure: narrow enough to fit on a phone."""
    figure = Figure(figsize=(NARROW, 5.9))
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
                axes.text(0.02, line, "plain Adam's final loss is never reached", va="center", color="0.3", fontsize=9)
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
