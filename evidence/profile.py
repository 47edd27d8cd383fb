"""The scoreboards of all workloads in one figure and one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cprop_lab.analysis.scoreboard import FURTHEST, Entry, benchmark_score, difference, part_in_words, profile
from cprop_lab.analysis.spread import shown
from cprop_lab.output.drawing import (
    COLOURS,
    WIDTH,
    entitle,
    legend,
    logarithmic,
    looks,
    name_rows,
    percent,
    plain,
    styled,
    ticks,
)
from cprop_lab.output.tables import Table, bold_with_cprop

__all__ = ["comparison", "final_losses", "performance_profile", "summary"]

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
    beside.barh(range(len(ranked)), scores, 0.7, color=[COLOURS[0] if "CProp" in row else "0.7" for row in ranked])
    name_rows([beside], ranked)
    beside.set_title("benchmark score")
    ticks(beside.xaxis, 4, plain)
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
            bold_with_cprop(row),
            f"{benchmark_score(own):.2f}",
            *(part_in_words(by_name[where][row], 0) for where in boards),
        ]
        for row, own in sorted(ratios.items(), key=lambda item: -benchmark_score(item[1]))
    ]
    return Table(["optimizer", "score", *boards], rows)


@styled()
def final_losses(boards: Boards, title: str = "") -> Figure:
    """The final training loss of each row on each workload, a dot per seed, lowest mean rank first.

    Args:
        boards: the rows of each workload.
        title: above all.
    """
    ranked = _by_rank(boards)
    figure = Figure(figsize=(WIDTH, 0.34 * len(ranked) + 1.0))
    panels = figure.subplots(1, len(boards), sharey=True, squeeze=False)[0]
    for axes, (where, entries) in zip(panels, boards.items(), strict=True):
        axes.set_title(where.replace(", ", ",\n").replace(" (", "\n("))
        losses = {ranked.index(entry.name): entry.end() for entry in entries if entry.name in ranked}
        for place, ends in losses.items():
            look = {"color": COLOURS[0] if "CProp" in ranked[place] else "0.4"}
            axes.plot(ends, [place] * len(ends), linestyle="", marker="o", markersize=4, alpha=0.4, **look)
            if ends:
                axes.plot(fmean(ends), place, marker="|", markersize=12, markeredgewidth=2, **look)
        ends = [loss for own in losses.values() for loss in own]
        ticks(axes.xaxis, 3, plain)
        if max(ends) > 3 * min(ends):
            logarithmic(axes, "x", min(ends) / 1.3, max(ends) * 1.3, 3)
    name_rows(panels, ranked)
    figure.supxlabel("final training loss; dots: single seeds, line: their mean; bold: with CProp", fontsize=8)
    entitle(figure, title)
    return figure


def comparison(boards: Boards) -> Table:
    """Final training losses on every workload, and how much lower or higher they are than those of CProp's row.

    Args:
        boards: the rows of each workload; one of those that all have is with CProp.
    """
    shared = _by_rank(boards)
    (ours,) = (row for row in shared if "CProp" in row)
    cells: dict[str, list[str]] = {row: [] for row in shared}
    for entries in boards.values():
        by_name = {entry.name: entry for entry in entries}
        for row, texts in cells.items():
            compared = "" if row == ours else f" ({difference(by_name[row].runs, by_name[ours].runs)})"
            texts.append(shown(by_name[row].end()) + compared)
    return Table(["optimizer", *boards], [[bold_with_cprop(row), *texts] for row, texts in cells.items()])


def _by_rank(boards: Boards) -> list[str]:
    """The rows that all workloads have, from the lowest final training losses up, by their mean rank."""
    ranks: dict[str, list[int]] = {}
    for entries in boards.values():
        for rank, entry in enumerate(sorted(entries, key=lambda entry: fmean(entry.end() or [math.inf]))):
            ranks.setdefault(entry.name, []).append(rank)
    everywhere = [row for row, own in ranks.items() if len(own) == len(boards)]
    return sorted(everywhere, key=lambda row: fmean(ranks[row]))
