"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

from benchmarks import EVIDENCE, IMAGES
from cprop_lab.analysis.scoreboard import Entry, scores
from cprop_lab.output import pages, profile
from cprop_lab.output.drawing import save

PICTURE = IMAGES / "scoreboard.png"
WORKLOADS = {
    "fmnist-fc": "Fashion-MNIST, fully connected",
    "fmnist-cnn": "Fashion-MNIST, convolutional",
    "ptb-lstm-small": "Penn Treebank, LSTM",
    "ptb-transformer": "Penn Treebank, transformer (words)",
    "ptb-gpt": "Penn Treebank, transformer (characters)",
}


def finished() -> dict[str, pages.Kept]:
    """The committed scoreboards, by the title of their workload."""
    kept = pages.kept(EVIDENCE)
    names = {title: f"scoreboard-{workload}" for workload, title in WORKLOADS.items()}
    return {title: kept[name] for title, name in names.items() if name in kept}


def boards() -> dict[str, list[Entry]]:
    """Their rows."""
    return {title: scores(*experiment) for title, experiment in finished().items()}


def table() -> str:
    """Iterations to AdamW's final loss, on every workload."""
    return profile.summary(boards()).markdown()


def draw() -> None:
    """Draw the performance profile."""
    save(profile.performance_profile(boards()), PICTURE)
    pages.mark(PICTURE, digest())


def digest() -> str:
    """The data of the figure."""
    return pages.digest_of_several(finished().values())
