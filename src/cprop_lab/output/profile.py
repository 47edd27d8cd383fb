"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cprop_lab.analysis.scoreboard import FURTHEST, Entry, benchmark_score, part_in_words, profile
from cprop_lab.output.drawing import COLOURS, WIDTH, entitle, legend, looks, percent, plain, styled, ticks
from cprop_lab.output.tables import Table

__all__ = ["performance_profile", "summary"]

Boards = Mapping[str, Sequence[Entry]]
"""The rows of each workload, by the workload's name."""

SHOWN: Final = (
    *("AdamW", "CProp(AdamW)", "AdamW, cosine", "Schedule-Free AdamW"),
    *("Muon", "CProp(Muon)", "Muon, averaged", "CProp(Muon), averaged"),
)
"""Rows that have a line; all have a bar."""


@styled()
def performance_profile(boards: Boards, title: str = "") -> Figure:
    """On how many workloads a row is close to the fastest: AlgoPerf's performance profile and benchmark score.

    Args:
        boards: the rows of each workload.
        title: above all.
    """
    ratios = profile(list(boards.values()))
    ranked = sorted(ratios, key=lambda row: -benchmark_score(ratios[row]))
    figure = Figure(figsize=(WIDTH, 0.2 * len(ranked) + 0.8))
    beside, axes = figure.subplots(1, 2, width_ratios=(2, 3))
    scores = [benchmark_score(ratios[row]) for row in ranked]
    with_cprop = ["CProp" in row for row in ranked]
    beside.barh(range(len(ranked)), scores, 0.7, color=[COLOURS[0] if own else "0.7" for own in with_cprop])
    beside.set_yticks(range(len(ranked)), ranked)
    beside.set_ylim(len(ranked) - 0.5, -0.5)
    beside.set_title("benchmark score")
    beside.grid(False, axis="y")
    beside.tick_params(axis="y", length=0)
    ticks(beside.xaxis, 4, plain)
    for label, own in zip(beside.get_yticklabels(), with_cprop, strict=True):
        label.set_fontweight("bold" if own else "normal")
    entries = {entry.name: entry for board in boards.values() for entry in board}
    drawn = looks({entries[row].specification: row for row in SHOWN if row in ratios})
    for row, look in drawn.items():
        there = sorted(ratio for ratio in ratios[row] if math.isfinite(ratio))
        shares = [(place + 1) / len(boards) for place in range(len(there))]
        axes.step([1.0, *there, FURTHEST], [0.0, *shares, shares[-1] if shares else 0.0], where="post", **look)
    axes.set(xlim=(1, FURTHEST), ylim=(0, 1.03), xlabel="iterations, as a multiple of the fastest row's")
    axes.set_title("workloads on which AdamW's final loss is reached by then")
    ticks(axes.xaxis, 6, plain)
    ticks(axes.yaxis, 5, percent)
    entitle(figure, title)
    caption = f"bar: area under the line, up to {FURTHEST:g} times the fastest; bold: with CProp"
    lines = [Line2D([], [], label=row, **look) for row, look in drawn.items()]
    legend(figure, lines, caption, [line.get_color() for line in lines])
    return figure


def summary(boards: Boards) -> Table:
    """Iterations to the first target on every workload, as fractions of the run, and the benchmark score."""
    ratios = profile(list(boards.values()))
    by_name = {where: {entry.name: entry for entry in entries} for where, entries in boards.items()}
    rows = [
        [
            f"**{row}**" if "CProp" in row else row,
            f"{benchmark_score(own):.2f}",
            *(part_in_words(by_name[where][row], 0) for where in boards),
        ]
        for row, own in sorted(ratios.items(), key=lambda item: -benchmark_score(item[1]))
    ]
    return Table(["optimizer", "score", *boards], rows)
