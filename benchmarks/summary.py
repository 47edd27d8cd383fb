"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

from benchmarks import EVIDENCE, IMAGES
from cprop_lab.analysis.scoreboard import Entry, scores
from cprop_lab.analysis.spread import shown
from cprop_lab.output import pages, profile
from cprop_lab.output.drawing import save
from cprop_lab.output.tables import Table

PICTURE = IMAGES / "scoreboard.png"
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
    """Final training losses of the finalists for the next rule and of their peers, on every workload."""
    losses: dict[str, dict[str, list[float]]] = {}
    for title, entries in boards("finalists").items():
        for entry in entries:
            losses.setdefault(entry.name, {})[title] = entry.end()
    titles = list(finished("finalists"))
    rows = [
        [f"**{name}**" if "CProp" in name else name, *(shown(own.get(title, ())) for title in titles)]
        for name, own in losses.items()
    ]
    return Table(["final training loss", *titles], rows).markdown()


def draw() -> None:
    """Draw the performance profile."""
    save(profile.performance_profile(boards()), PICTURE)
    pages.mark(PICTURE, digest())


def digest() -> str:
    """The data of the figure."""
    return pages.digest_of_several(finished().values())
