"""Figures of runs in the paper's style: lists of runs in, a matplotlib figure out; and which ones an experiment has."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Final

import numpy as np
from matplotlib import colormaps, colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cprop_lab.analysis.curves import by_step, choose, final_loss, over_seeds
from cprop_lab.analysis.groups import WORDS, by_workload, grouped, judged_by, kin, metric, names, with_status
from cprop_lab.analysis.pairs import Pair, outcome, pairs_of
from cprop_lab.analysis.scoreboard import Entry, part_in_words, scores, to_the_loss_of
from cprop_lab.analysis.spread import as_measured, spread
from cprop_lab.output.drawing import (
    COLOURS,
    NARROW,
    WIDTH,
    Look,
    entitle,
    legend,
    logarithmic,
    looks,
    name_rows,
    percent,
    plain,
    styled,
    thousands,
    ticks,
)
from cprop_lab.run.evaluation import BINS, METRICS
from cprop_lab.run.specification import Specification
from cprop_lab.store import Manifest, Run, measured

__all__ = ["BAR_ALPHA", "curves", "draw", "histogram", "learning_rates", "preset", "scoreboard", "times_to_target"]


LOSSES: Final = ("train_loss", "test_loss", "perplexity")
LOGARITHMIC: Final = (*LOSSES, "lr")
FURTHEST: Final = 2.0
"""Perplexities beyond so many times the middle row's are written, and not drawn."""


def _over_seeds_words(runs: Sequence[Run], mean: str, deviation: str) -> str:
    """How to read lines and areas, which depends on whether there are several seeds."""
    if len({run.specification.seed for run in runs}) == 1:
        return "one seed"
    return f"{mean}: mean over seeds; {deviation}: one standard deviation"


CROSS: Final[Look] = {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.5}
"""Where a run diverged."""
BEST: Final[Look] = {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "color": "black"}


# Curves over iterations.


@styled()
def curves(
    runs: Sequence[Run], panels: Sequence[str] = ("train_loss", "accuracy", "mean_scale"), title: str = ""
) -> Figure:
    """Curves over iterations: a row for each workload, option and batch size, a column for each panel.

    A line is the mean over seeds, not smoothed, and the area around it one standard deviation. A run that diverged goes
    as far as it got and ends in a cross.

    Args:
        runs: of any optimizers and workloads.
        panels: columns of the runs' curves; ``"accuracy"`` stands for perplexity where that is what was measured.
        title: above all.

    Raises:
        ValueError: if no run has any of the panels.
    """
    groups = grouped(runs)
    named = names(groups)
    drawn = looks(named)
    rows = {where: {named[group]: groups[group] for group in members} for where, members in by_workload(groups).items()}
    columns = [panel for panel in panels if any(measured(runs, column) for column in _meant(panel))]
    if not columns:
        raise ValueError(f"no run has a column {' or '.join(panels)}: pass finished runs, and columns that they have")

    figure = Figure(figsize=(WIDTH if len(columns) > 1 else WIDTH * 0.75, 2.4 * len(rows) + 0.3))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for row, (where, lines) in zip(grid, rows.items(), strict=True):
        row[0].set_title(where, fontweight="bold")
        for axes, panel in zip(row, columns, strict=True):
            _panel(axes, panel, lines, drawn)
    for axes in grid[-1]:
        axes.set_xlabel(WORDS["step"])

    entitle(figure, title)
    handles = []
    for name, look in drawn.items():
        own = [run for lines in rows.values() for run in lines.get(name, ())]
        diverged = len(with_status(own, "diverged"))
        handles.append(Line2D([], [], label=name + f" (diverged: {diverged} of {len(own)})" * bool(diverged), **look))
    crosses = "; cross: a run diverged" * bool(with_status(runs, "diverged"))
    families = {named[group]: kin(group).family for group in groups}
    begun_later = [
        WORDS[column] for column in METRICS if measured(runs, column) and not set(columns).isdisjoint(METRICS)
    ]
    later = f"; {' and '.join(begun_later)} from a tenth of the run on" * bool(begun_later)
    caption = _over_seeds_words(runs, "line", "area") + crosses + later
    legend(figure, handles, caption, [families[name] for name in drawn])
    return figure


def _meant(panel: str) -> Sequence[str]:
    return METRICS if panel in METRICS else (panel,)


def _panel(axes: Axes, panel: str, lines: Mapping[str, Sequence[Run]], drawn: Mapping[str, Look]) -> None:
    """One panel of one workload; empty if nothing of the kind was measured there."""
    column = metric([run for runs in lines.values() for run in runs]) if panel in METRICS else panel
    shown: list[tuple[int, float]] = []
    for name, runs in lines.items():
        line = over_seeds(runs, column)
        if not line:
            continue
        mean, deviation, _ = np.array(list(line.values())).T
        axes.plot(list(line), mean, **drawn[name])
        colour = drawn[name]["color"]
        axes.fill_between(list(line), mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        shown += zip(line, mean, strict=True)
        for run in with_status(runs, "diverged"):
            # From the last valid value to the one at which the run was stopped.
            end = [(step, value) for step, (value,) in by_step([run], lambda run: run.column(column)).items()][-2:]
            axes.plot([step for step, _ in end], [value for _, value in end], color=colour, linewidth=0.7)
            axes.plot(*zip(*end[-1:], strict=True), color=colour, **CROSS)
            shown += end
    if not shown:
        axes.set_axis_off()
        return
    axes.set_ylabel(WORDS.get(column, column))
    _limit(axes, column, shown)
    ticks(axes.xaxis, 5, thousands)


def _limit(axes: Axes, column: str, shown: Sequence[tuple[int, float]]) -> None:
    """Set the range of values that is seen."""
    if column in METRICS:
        # The first rise or fall is steep and the same for all; on its scale, later differences would vanish.
        begin = max(step for step, _ in shown) / 10
        shown = [(step, value) for step, value in shown if step >= begin]
    low, high = (of(value for _, value in shown) for of in (min, max))
    if column in LOSSES and low > 0:
        # A line that rises above where all began has fallen apart, and leaves the picture: the others need the room.
        first = min(step for step, _ in shown)
        high = min(high, max(value for step, value in shown if step == first))
    if column in LOGARITHMIC and low > 0:
        logarithmic(axes, "y", low / (high / low) ** 0.05 / 1.02, high * (high / low) ** 0.05 * 1.02)
        return
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(0 if column == "mean_scale" else low - margin, high + margin)
    ticks(axes.yaxis, 6, percent if column == "accuracy" else plain)


# The scale's distribution.


@styled()
def histogram(runs: Sequence[Run], title: str = "") -> Figure:
    """The distribution of CProp's scale over time, and beside it its mean: a row for each group of runs that has one.

    Iterations go upwards: the start is at the bottom. Both are means over seeds.

    Raises:
        ValueError: if no run has scales.
    """
    groups = {group: own for group, own in grouped(runs).items() if measured(own, "mean_scale")}
    if not groups:
        raise ValueError("no run has scales: pass finished runs of optimizers with CProp")
    named = names(groups)
    figure = Figure(figsize=(WIDTH * 0.85, 2.7 * len(groups) + 0.9))
    grid = figure.subplots(len(groups), 2, squeeze=False, sharey="row", width_ratios=(1.6, 1))
    several = len(by_workload(groups)) > 1
    for (image, mean), (group, own) in zip(grid, groups.items(), strict=True):
        image.set_title(named[group] + f": {group.workload_label}" * several, fontweight="bold")
        shares = by_step(own, lambda run: run.histogram())
        steps = np.array(list(shares), dtype=float)
        between = (steps[1:] + steps[:-1]) / 2
        drawn = image.pcolormesh(
            np.linspace(0, 1, BINS + 1),
            np.array([steps[0], *between, max(steps[-1], steps[0] + 1)]),
            np.array([np.mean(rows, axis=0) for rows in shares.values()]),
            norm=colors.LogNorm(1e-3, 1.0, clip=True),
            cmap="cividis",
            rasterized=True,  # vector rectangles would have seams between them
        )
        image.grid(False)
        image.set(ylabel="iterations (start at the bottom)")
        line = over_seeds(own, "mean_scale")
        middle, deviation, _ = np.array(list(line.values())).T
        mean.plot(middle, list(line), color=COLOURS[0])
        mean.fill_betweenx(
            list(line), middle - deviation, middle + deviation, color=COLOURS[0], alpha=0.15, linewidth=0
        )
        mean.set_xlim(left=0)
        ticks(image.yaxis, 5, thousands)
    for axes, label in zip(grid[-1], ("scale", WORDS["mean_scale"]), strict=True):
        axes.set_xlabel(label)
    bar = figure.colorbar(drawn, ax=list(grid.flat), location="bottom", shrink=0.6, aspect=40)
    bar.set_label("share of all parameters")
    bar.set_ticks([1e-3, 1e-2, 0.1, 1], labels=["0.1 % or less", "1 %", "10 %", "100 %"])
    entitle(figure, title)
    return figure


# The search for a learning rate.


PANELS: Final = 12
"""The most searches that have a panel each."""


@styled()
def learning_rates(runs: Sequence[Run], title: str = "", panels: int = PANELS) -> Figure:
    """The final training loss against the learning rate: a panel for each optimizer, with the best one marked.

    Where a seed diverged there is no mean; such a learning rate has a cross at the top edge.

    Args:
        runs: of any optimizers and learning rates.
        title: above all.
        panels: more optimizers than that have a row each instead.

    Raises:
        ValueError: if there are no runs.
    """
    if not runs:
        raise ValueError("no runs to draw: pass finished runs")
    searches: dict[Specification, dict[float, list[Run]]] = {}
    for group, own in grouped(runs).items():
        # Any learning rate will do to name the search.
        searches.setdefault(group.replace(lr=1.0), {})[group.lr] = own
    named = names(searches)
    if len(searches) > panels:
        return _searches_in_rows({named[search]: found for search, found in searches.items()}, title)
    drawn = looks(named)
    places = by_workload(searches)
    lines = math.ceil(len(searches) / 4)
    columns = math.ceil(len(searches) / lines)
    figure = Figure(figsize=(WIDTH if columns > 2 else WIDTH * 0.75, 2.5 * lines + 0.3))
    grid = figure.subplots(lines, columns, squeeze=False)
    free = iter(grid.flat)
    for where, members in places.items():
        # Losses of one workload are comparable, so they share a range.
        ends = [final_loss(run) for search in members for own in searches[search].values() for run in own]
        for search, axes in zip(members, free, strict=False):
            axes.set_title(named[search] + f"\n{where}" * (len(places) > 1), fontweight="bold")
            _search(axes, searches[search], drawn[named[search]], [loss for loss in ends if math.isfinite(loss)])
    for axes in free:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("final training loss")
    entitle(figure, title)
    handles = [Line2D([], [], label="the best", **BEST)]
    if with_status(runs, "diverged"):
        handles.append(Line2D([], [], label="a seed diverged", color="0.3", **CROSS))
    legend(figure, handles, _over_seeds_words(runs, "line", "bar") + "; dots: single seeds")
    return figure


OFF: Final = 5
"""Dots are drawn up to so many times the highest of the optimizers' lowest losses."""


def _searches_in_rows(searches: Mapping[str, Mapping[float, Sequence[Run]]], title: str) -> Figure:
    """A row for each optimizer, from the one with the lowest loss down: a dot for each learning rate."""
    losses = {
        name: {lr: fmean(final_loss(run) for run in runs) for lr, runs in by_lr.items()}
        for name, by_lr in searches.items()
    }
    ordered = sorted(losses, key=lambda name: min(losses[name].values()))
    rates = sorted({lr for found in losses.values() for lr in found})
    # A rate at which nothing was learnt would squeeze all others into a corner.
    furthest = OFF * max((low for found in losses.values() if math.isfinite(low := min(found.values()))), default=0.0)
    ends = [loss for found in losses.values() for loss in found.values() if loss <= furthest]
    figure = Figure(figsize=(WIDTH, 0.26 * len(ordered) + 0.8))
    axes = figure.subplots()
    axes.set_xlabel("final training loss")
    if ends and min(ends) > 0:
        logarithmic(axes, "x", min(ends) * 0.98, max(ends) * 1.02)
    axes.set_yticks(range(len(ordered)), ordered)
    axes.invert_yaxis()
    handles = []
    for lr, shade in zip(rates, colormaps["viridis"](np.linspace(0, 0.95, len(rates))), strict=True):
        rows = [row for row, name in enumerate(ordered) if losses[name].get(lr, math.inf) <= furthest]
        look: Look = {"linestyle": "", "marker": "o", "markersize": 5, "color": shade}
        axes.plot([losses[ordered[row]][lr] for row in rows], rows, **look)
        handles.append(Line2D([], [], label=f"{lr:g}", **look))
    seeds = len({run.specification.seed for found in searches.values() for runs in found.values() for run in runs})
    missing = f"; no dot where a seed diverged or the loss is above {furthest:.2g}"
    caption = "learning rate; " + ("one seed" if seeds == 1 else "mean over seeds")
    entitle(figure, title)
    legend(figure, handles, caption + missing * (len(ends) < sum(map(len, losses.values()))))
    return figure


def _search(axes: Axes, by_lr: Mapping[float, Sequence[Run]], look: Look, ends: Sequence[float]) -> None:
    """The panel of one optimizer, on a range that holds all of the workload's losses."""
    losses = {lr: [final_loss(run) for run in runs] for lr, runs in sorted(by_lr.items())}
    axes.set_xlabel(WORDS["lr"])
    logarithmic(axes, "x", min(losses) / 2.5, max(losses) * 2.5)
    if ends and min(ends) > 0:
        ratio = max(ends) / min(ends) * 1.05
        logarithmic(axes, "y", min(ends) / ratio**0.3, max(ends) * ratio**0.25)
    elif not ends:
        axes.set_yticks([])
    for lr, values in losses.items():
        axes.plot([lr] * len(values), values, linestyle="", marker=".", markersize=4, color=look["color"], alpha=0.5)
        if math.inf in values:
            axes.plot(lr, 0.95, transform=axes.get_xaxis_transform(), color="0.3", **CROSS)
    means = {lr: spread(values) for lr, values in losses.items() if math.inf not in values}
    if not means:
        return
    middle, deviation, _ = np.array(list(means.values())).T
    axes.errorbar(list(means), middle, np.nan_to_num(deviation), capsize=2.5, **{**look, "marker": ""})
    best = choose({lr: found.mean for lr, found in means.items()})
    axes.plot(best, means[best].mean, **BEST)
    about = f"best: {best:g}, loss {means[best].mean:.3g}"
    axes.text(0.04, 0.04, about, transform=axes.transAxes, fontsize=8)


# Times to a target.

BARS: Final = {"iterations": (-0.2, COLOURS[0]), "seconds": (0.2, COLOURS[4])}
"""Where in its row each bar stands, and its colour."""
BAR_ALPHA: Final = 0.55
MANY: Final = 200
"""Dots above this number are drawn as an image: as vectors they would fill a page."""


@styled()
def times_to_target(pairs: Mapping[str, Pair], title: str = "") -> Figure:
    """The fraction of the plain optimizer's iterations and seconds that CProp needs to reach its final loss.

    A bar is the mean over seeds, a point one seed. Where a seed never got there, there is no mean, and that is written;
    so is it where there is no verdict on time.

    Args:
        pairs: by name, as :func:`cprop_lab.analysis.pairs.pairs` gives them.
        title: above all.

    Raises:
        ValueError: if there are no pairs.
    """
    if not pairs:
        raise ValueError("no pairs to draw: run an optimizer without and with CProp, on the same seeds")
    figure = Figure(figsize=(NARROW, 0.55 * len(pairs) + 0.7))
    axes = figure.subplots()
    axes.grid(False, axis="y")
    axes.axvline(1, color="black", linewidth=1)
    furthest = 1.0
    for row, pair in enumerate(pairs.values()):
        for of, (offset, _) in BARS.items():
            shares = pair.shares(of) if pair.comparable(of) else []
            furthest = max(furthest, _bar(axes, row, of, fmean(shares) if shares else math.nan, shares))
            # Next to the panel, where nothing lies under the words.
            beside = axes.get_yaxis_transform()
            axes.text(1.01, row + offset, outcome(pair, of), transform=beside, va="center", fontsize=8)
    axes.set_yticks(range(len(pairs)), [textwrap.fill(name, 24) for name in pairs])
    axes.set_ylim(len(pairs) - 0.45, -0.55)
    axes.set_xlim(0, furthest * 1.03)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("relative to the plain optimizer, to reach its final training loss")
    entitle(figure, title)
    legend(
        figure,
        [*_bar_handles(), Line2D([], [], color="black", linewidth=1, label="as long as without CProp")],
        "bar: mean over seeds; dots: single seeds",
    )
    return figure


def _bar(axes: Axes, row: int, of: str, length: float, seeds: Sequence[float]) -> float:
    """A bar, and a dot for each seed; without what is not finite. Returns how far the dots go."""
    offset, colour = BARS[of]
    if math.isfinite(length):
        axes.barh(row + offset, length, 0.36, color=colour, alpha=BAR_ALPHA, linewidth=0)
    there = [seed for seed in seeds if math.isfinite(seed)]
    dots: Look = {"color": colour, "markerfacecolor": "white", "markersize": 3, "rasterized": len(there) > MANY}
    axes.plot(there, [row + offset] * len(there), "o", **dots)
    return max(there, default=0.0)


def _bar_handles() -> list[Line2D | Patch]:
    """What the bars' colours mean, for a legend."""
    return [Patch(color=colour, alpha=BAR_ALPHA, label=of) for of, (_, colour) in BARS.items()]


# The scoreboard.


@styled()
def scoreboard(entries: Sequence[Entry], title: str = "") -> Figure:
    """Every optimizer's iterations and seconds to the targets, and beside them how it generalises.

    A bar is the median over seeds, a point one seed. CProp's rows stand out by bold names.

    Args:
        entries: in the order to be shown, as :func:`cprop_lab.analysis.scoreboard.score` gives them.
        title: above all.
    """
    figure = Figure(figsize=(WIDTH, 0.32 * len(entries) + 0.9))
    targets = entries[0].targets
    *panels, beside = figure.subplots(1, len(targets) + 1, sharey=True)
    for number, (axes, target) in enumerate(zip(panels, targets, strict=True)):
        axes.axvline(1, color="black", linewidth=1)
        furthest = 1.0
        for row, entry in enumerate(entries):
            for of in BARS:
                times = entry.cost if of == "seconds" else 1.0
                parts = [part * times for part in entry.iterations[number]]
                furthest = max(furthest, _bar(axes, row, of, entry.part(number, of), parts))
            if math.isinf(entry.part(number)):
                axes.text(0.02, row, part_in_words(entry, number), va="center", fontsize=8, color="0.3")
        axes.set_xlim(0, furthest * 1.05)
        axes.set_title("\n".join(textwrap.wrap(to_the_loss_of(target), 26)))
        axes.set_xlabel(f"fraction of {Specification('', targets[0], lr=1.0).label}'s run")
        ticks(axes.xaxis, 5, plain)
    column = judged_by(entries[0].runs)
    furthest = FURTHEST * median([value for entry in entries for value in entry.end(column)] or [math.inf])
    for row, entry in enumerate(entries):
        ends = entry.end(column)
        if column == "perplexity" and ends and max(ends) > furthest:
            where = beside.get_yaxis_transform()
            beside.text(0.02, row, as_measured(ends, column), va="center", fontsize=8, color="0.3", transform=where)
            continue
        beside.plot(ends, [row] * len(ends), "o", color=COLOURS[2], markerfacecolor="white", markersize=3)
        if ends:
            beside.plot(spread(ends).mean, row, "|", color=COLOURS[2], markersize=9, markeredgewidth=2)
    beside.set_title(f"final\n{WORDS[column]}")
    ticks(beside.xaxis, 4, percent if column == "accuracy" else plain)
    name_rows((*panels, beside), [entry.name for entry in entries])
    entitle(figure, title)
    legend(figure, _bar_handles(), "bar: median over seeds; dots: single seeds; shorter is better; bold: with CProp")
    return figure


# Which of them an experiment has.


def preset(manifest: Manifest) -> str:
    """An experiment's preset, and whether that is less than the paper's."""
    return f"{manifest['preset']}{': shorter than the paper preset' * bool(manifest['reduced'])}"


def draw(
    manifest: Manifest, runs: Sequence[Run], timings: Sequence[Run] = (), titled: bool = True
) -> dict[str, Figure]:
    """An experiment's figures, by the suffix of their file names.

    Args:
        manifest: the experiment, as stored.
        runs: its finished runs; some may be missing, and without any there is nothing to draw.
        timings: a scoreboard's short runs.
        titled: whether figures have a title, for use outside the page.
    """
    title = (manifest["title"] + f" · {preset(manifest)}" * bool(manifest["reduced"])) * titled
    found = {}
    if manifest["kind"] == "learning-rates" and runs:
        found[""] = learning_rates(runs, title)
    if manifest["kind"] == "rates" and runs:
        found[""] = learning_rates(runs, title, panels=0)
    if manifest["kind"] == "histogram" and measured(runs, "mean_scale"):
        found[""] = histogram(runs, title)
    if manifest["kind"] in ("curves", "scoreboard") and runs:
        longest = max(run.specification.iterations for run in runs)  # of a scoreboard's two horizons
        whole = [run for run in runs if run.specification.iterations == longest]
        found[""] = curves(whole if manifest["kind"] == "scoreboard" else runs, manifest["panels"], title)
    if entries := scores(manifest, runs, timings):
        found["-scores"] = scoreboard(entries, title)
    elif found_pairs := pairs_of(manifest, runs):
        found["-times"] = times_to_target(found_pairs, title)
    return found
