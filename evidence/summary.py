"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

from pathlib import Path

from cprop_lab.analysis.scoreboard import Entry, scores
from cprop_lab.output.drawing import save
from evidence import EVIDENCE, IMAGES, pages, profile

WORKLOADS = {
    "fmnist-fc": "Fashion-MNIST, fully connected",
    "fmnist-cnn": "Fashion-MNIST, convolutional",
    "ptb-lstm-small": "Penn Treebank, LSTM",
    "ptb-transformer": "Penn Treebank, transformer (words)",
    "ptb-gpt": "Penn Treebank, transformer (characters)",
}


def finished(kind: str = "scoreboard") -> dict[str, pages.Kept]:
    """The committed scoreboards, or boards of finalists, by the title of their workload."""
    kept = pages.kept(EVIDENCE)
    names = {title: f"{kind}-{workload}" for workload, title in WORKLOADS.items()}
    return {title: kept[name] for title, name in names.items() if name in kept}


def boards(kind: str = "scoreboard") -> dict[str, list[Entry]]:
    """Their rows."""
    return {title: scores(*experiment) for title, experiment in finished(kind).items()}


def table() -> str:
    """Iterations to AdamW's final loss, on every workload."""
    return profile.summary(boards()).markdown()


def finalists() -> str:
    """Final training losses of the finalist for the next rule and of its peers, on every workload."""
    kind = "finalists"
    table = profile.comparison(boards(kind)).markdown()
    # Timings are not in it.
    mark = pages.mixed_builds(one._replace(timings=[]) for one in finished(kind).values())
    return "\n\n".join(filter(None, (table, mark)))


def picture(kind: str) -> Path:
    """The file of a figure."""
    return IMAGES / f"{kind}.png"


def digest(kind: str) -> str:
    """The data of a figure."""
    return pages.digest_of_several(finished(kind).values())


def draw() -> None:
    """Draw the performance profile, and the final losses of the finalists."""
    for kind, drawn in (("scoreboard", profile.performance_profile), ("finalists", profile.final_losses)):
        save(drawn(boards(kind)), picture(kind))
        pages.mark(picture(kind), digest(kind))
