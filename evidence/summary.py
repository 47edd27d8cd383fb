"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

import re
from pathlib import Path

from cprop_lab.analysis.scoreboard import Entry, benchmark_score, scores
from cprop_lab.analysis.scoreboard import profile as profiles
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


def verdict() -> str:
    """Every row with CProp beside the same row without it, by score."""
    by_row = {row: benchmark_score(ratios) for row, ratios in profiles(list(boards().values())).items()}
    compared = {
        row: re.sub(r"CProp\((\w+)\)", r"\1", row).removesuffix(", own rate") for row in by_row if "CProp" in row
    }
    behind = sum(by_row[row] < by_row[plain] for row, plain in compared.items())
    listed = "; ".join(f"{row}: {by_row[row]:.2f} against {by_row[plain]:.2f}" for row, plain in compared.items())
    return f"By score, {behind} of {len(compared)} rows with CProp are behind the same optimizer without it ({listed})."


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
