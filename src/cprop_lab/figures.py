"""Figures of runs in the paper's style: lists of runs in, a matplotlib figure out.

Figures are made without pyplot, so they need no display and need not be closed.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import colors, style, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cprop_lab.groups import (
    WORDS,
    Kin,
    by_place,
    by_step,
    grouped,
    judged_by,
    kin,
    metric,
    names,
    over_seeds,
    place,
    with_status,
)
from cprop_lab.learning_rate import choose, final_loss
from cprop_lab.results import BINS, METRICS, Run, measured
from cprop_lab.scoreboard import TARGETS, Entry, part_in_words
from cprop_lab.specification import Specification
from cprop_lab.targets import Pair, outcome, spread

__all__ = ["curves", "histogram", "learning_rates", "save", "scoreboard", "times_to_target", "to_svg"]

Look = dict[str, Any]
"""How a line is drawn, as keyword arguments of matplotlib."""

WIDTH: Final = 9.0
"""In inches: at 100 pixels an inch, the width of a README's column."""
NARROW: Final = 5.4
"""Of what a phone should show whole."""

# From Okabe and Ito's palette, which colour-blind people can tell apart; without yellow, which is too light for a line
# on white, and black, which is reserved for what belongs to no optimizer.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHADES: Final = ("YlGnBu", "YlOrRd", "YlGn", "RdPu", "YlOrBr", "PuBu")
"""The colour maps of matplotlib closest to these colours."""
MARKERS: Final = ("", "o", "s", "^")
"""Used in turn where there are more optimizers than colours."""

LOGARITHMIC: Final = ("train_loss", "test_loss", "perplexity", "lr")

STYLE: Final[Mapping[str, Any]] = {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "0.4",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8,
    "legend.handlelength": 2.6,  # long enough to show dashes next to a marker
    "legend.columnspacing": 1.3,
    "lines.linewidth": 1.5,
    "text.parse_math": False,  # names come from users: a dollar sign is just that
    "svg.hashsalt": "cprop",  # the same figure makes the same file
}

# The user's matplotlibrc is ignored, so that a figure looks the same everywhere.
_styled = partial(style.context, dict(STYLE), after_reset=True)


def looks(named: Mapping[Specification, str]) -> dict[str, Look]:
    """How each line is drawn, by its name: solid with CProp, dashed without, both in the same colour.

    Several lines of a family with CProp (or without), such as those of different ``c``, get shades of its colour, from
    light to dark.
    """
    kins: dict[Kin, dict[str, None]] = {}  # names as a set that keeps its order
    for group, name in named.items():
        kins.setdefault(kin(group), {})[name] = None
    families = list(dict.fromkeys(family for family, _ in kins))
    found: dict[str, Look] = {}
    for (family, with_cprop), members in kins.items():
        turn, hue = divmod(families.index(family), len(COLOURS))
        shades = mpl.colormaps[SHADES[hue]](np.linspace(0.4, 1.0, len(members)))
        for name, shade in zip(members, shades, strict=True):
            found[name] = {
                "color": COLOURS[hue] if len(members) == 1 else colors.to_hex(shade),
                "linestyle": "-" if with_cprop else (0, (4, 1.5)),
                "marker": MARKERS[turn % len(MARKERS)],
                "markersize": 4,
                "markevery": 0.12,
            }
    return found


# What all figures share.


def _entitle(figure: Figure, title: str) -> None:
    if title:
        # About ten letters of this size fit into an inch.
        figure.suptitle("\n".join(textwrap.wrap(title, int(10 * figure.get_figwidth()))), fontsize=11)


def _legend(
    figure: Figure, handles: Sequence[Line2D | Patch], caption: str, kinds: Sequence[object] | None = None
) -> None:
    """A legend below the panels, where it covers nothing; its title says how to read the figure.

    Args:
        figure: grows by as much.
        handles: what it lists, by their labels.
        caption: its title.
        kinds: what each belongs to; those of a kind share a column if possible.
    """
    labels = [str(handle.get_label()) for handle in handles]
    width, height = figure.get_size_inches()

    def fits(columns: int) -> bool:
        # An estimate of the width of letters and handles, in inches.
        widths = [0.58 + 0.068 * max(map(len, part)) for part in np.array_split(labels, columns)]
        return sum(widths) <= float(width)

    def keeps_together(columns: int) -> bool:
        parts = [set(part) for part in np.array_split([str(kind) for kind in kinds or labels], columns)]
        return sum(map(len, parts)) == len(set.union(*parts))

    fitting = [columns for columns in range(2, len(labels) + 1) if fits(columns)] or [1]
    columns = max(filter(keeps_together, fitting), default=max(fitting))
    figure.set_size_inches(width, height + 0.2 * math.ceil(len(labels) / columns) + 0.3)
    figure.legend(handles=list(handles), title=caption, loc="outside lower center", ncols=columns)


def _ticks(axis: Axis, number: int, text: Callable[[float], str]) -> None:
    """About so many ticks, at round numbers."""
    axis.set_major_locator(ticker.MaxNLocator(number, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def _plain(value: float) -> str:
    return f"{value:.6g}"


def _percent(value: float) -> str:
    return f"{100 * value:.6g} %"


def _thousands(value: float) -> str:
    return f"{value / 1000:.6g}k" if value >= 1000 else _plain(value)


def _logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """A logarithmic axis with plain numbers at its ticks; matplotlib's are powers of ten, often one or none."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    decades = math.log10(high / low)
    _ticks(axis, 6, _plain)  # for a range with hardly a power of ten in it
    if decades > 0.6:
        # Only powers of ten, where there are enough of them.
        subs = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 2.5 else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
    axis.set_minor_formatter(ticker.NullFormatter())


def _over_seeds_words(runs: Sequence[Run], mean: str, deviation: str) -> str:
    """How to read lines and areas, which depends on whether there are several seeds."""
    if len({run.specification.seed for run in runs}) == 1:
        return "one seed"
    return f"{mean}: mean over seeds; {deviation}: one standard deviation"


CROSS: Final[Look] = {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.5}
"""Where a run diverged."""
BEST: Final[Look] = {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "color": "black"}


# Curves over iterations.


@_styled()
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
    rows = {where: {named[group]: groups[group] for group in members} for where, members in by_place(groups).items()}
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

    _entitle(figure, title)
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
    _legend(figure, handles, caption, [families[name] for name in drawn])
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
    _ticks(axes.xaxis, 5, _thousands)


def _limit(axes: Axes, column: str, shown: Sequence[tuple[int, float]]) -> None:
    """Set the range of values that is seen."""
    values = [value for _, value in shown]
    if column in METRICS:
        # The first rise or fall is steep and the same for all; on its scale, later differences would vanish.
        begin = max(step for step, _ in shown) / 10
        values = [value for step, value in shown if step >= begin]
    low, high = min(values), max(values)
    if column in LOGARITHMIC and low > 0:
        _logarithmic(axes, "y", low / (high / low) ** 0.05 / 1.02, high * (high / low) ** 0.05 * 1.02)
        return
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(0 if column == "mean_scale" else low - margin, high + margin)
    _ticks(axes.yaxis, 6, _percent if column == "accuracy" else _plain)


# The scale's distribution.


@_styled()
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
    several = len(by_place(groups)) > 1
    for (image, mean), (group, own) in zip(grid, groups.items(), strict=True):
        image.set_title(named[group] + f": {place(group)}" * several, fontweight="bold")
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
        _ticks(image.yaxis, 5, _thousands)
    for axes, label in zip(grid[-1], ("scale", WORDS["mean_scale"]), strict=True):
        axes.set_xlabel(label)
    bar = figure.colorbar(drawn, ax=list(grid.flat), location="bottom", shrink=0.6, aspect=40)
    bar.set_label("share of all parameters")
    bar.set_ticks([1e-3, 1e-2, 0.1, 1], labels=["0.1 % or less", "1 %", "10 %", "100 %"])
    _entitle(figure, title)
    return figure


# The search for a learning rate.


@_styled()
def learning_rates(runs: Sequence[Run], title: str = "") -> Figure:
    """The final training loss against the learning rate: a panel for each optimizer, with the best one marked.

    Where a seed diverged there is no mean; such a learning rate has a cross at the top edge.

    Raises:
        ValueError: if there are no runs.
    """
    if not runs:
        raise ValueError("no runs to draw: pass finished runs")
    searches: dict[Specification, dict[float, list[Run]]] = {}
    for group, own in grouped(runs).items():
        # Any learning rate will do to name the search.
        searches.setdefault(group.but(lr=1.0), {})[group.lr] = own
    named = names(searches)
    drawn = looks(named)
    places = by_place(searches)
    lines = math.ceil(len(searches) / 4)
    columns = math.ceil(len(searches) / lines)
    figure = Figure(figsize=(WIDTH if columns > 2 else WIDTH * 0.75, 2.5 * lines + 0.3))
    grid = figure.subplots(lines, columns, squeeze=False)
    panels = iter(grid.flat)
    for where, members in places.items():
        # Losses of one workload are comparable, so they share a range.
        ends = [final_loss(run) for search in members for own in searches[search].values() for run in own]
        for search, axes in zip(members, panels, strict=False):
            axes.set_title(named[search] + f"\n{where}" * (len(places) > 1), fontweight="bold")
            _search(axes, searches[search], drawn[named[search]], [loss for loss in ends if math.isfinite(loss)])
    for axes in panels:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("final training loss")
    _entitle(figure, title)
    handles = [Line2D([], [], label="the best", **BEST)]
    if with_status(runs, "diverged"):
        handles.append(Line2D([], [], label="a seed diverged", color="0.3", **CROSS))
    _legend(figure, handles, _over_seeds_words(runs, "line", "bar") + "; dots: single seeds")
    return figure


def _search(axes: Axes, by_lr: Mapping[float, Sequence[Run]], look: Look, ends: Sequence[float]) -> None:
    """The panel of one optimizer, on a range that holds all of the workload's losses."""
    losses = {lr: [final_loss(run) for run in runs] for lr, runs in sorted(by_lr.items())}
    axes.set_xlabel(WORDS["lr"])
    _logarithmic(axes, "x", min(losses) / 2.5, max(losses) * 2.5)
    if ends and min(ends) > 0:
        ratio = max(ends) / min(ends) * 1.05
        _logarithmic(axes, "y", min(ends) / ratio**0.3, max(ends) * ratio**0.25)
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
    best = list(means)[choose(dict(enumerate(middle)))]
    axes.plot(best, means[best].mean, **BEST)
    about = f"best: {best:g}, loss {means[best].mean:.3g}"
    axes.text(0.04, 0.04, about, transform=axes.transAxes, fontsize=8)


# Times to a target.

BARS: Final = {"iterations": (-0.2, COLOURS[0]), "seconds": (0.2, COLOURS[4])}
"""Where in its row each bar stands, and its colour."""
BAR_ALPHA: Final = 0.55


@_styled()
def times_to_target(pairs: Mapping[str, Pair], title: str = "") -> Figure:
    """The fraction of the plain optimizer's iterations and seconds that CProp needs to reach its final loss.

    A bar is the mean over seeds, a point one seed. Where a seed never got there, there is no mean, and that is written.

    Args:
        pairs: by name, as :func:`cprop_lab.targets.pairs` gives them.
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
            shares = pair.shares(of)
            furthest = max(furthest, _bar(axes, row, of, fmean(shares) if shares else math.nan, shares))
            # Next to the panel, where nothing lies under the words.
            beside = axes.get_yaxis_transform()
            axes.text(1.01, row + offset, outcome(pair, of), transform=beside, va="center", fontsize=8)
    axes.set_yticks(range(len(pairs)), [textwrap.fill(name, 24) for name in pairs])
    axes.set_ylim(len(pairs) - 0.45, -0.55)
    axes.set_xlim(0, furthest * 1.03)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("relative to the plain optimizer, to reach its final training loss")
    _entitle(figure, title)
    _legend(
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
    axes.plot(there, [row + offset] * len(there), "o", color=colour, markerfacecolor="white", markersize=3)
    return max(there, default=0.0)


def _bar_handles() -> list[Line2D | Patch]:
    """What the bars' colours mean, for a legend."""
    return [Patch(color=colour, alpha=BAR_ALPHA, label=of) for of, (_, colour) in BARS.items()]


# The scoreboard.


@_styled()
def scoreboard(entries: Sequence[Entry], title: str = "") -> Figure:
    """Every optimizer's iterations and seconds to the targets, and beside them how it generalises.

    A bar is the median over seeds, a point one seed. CProp's rows stand out by bold names.

    Args:
        entries: in the order to be shown, as :func:`cprop_lab.scoreboard.score` gives them.
        title: above all.
    """
    figure = Figure(figsize=(WIDTH, 0.32 * len(entries) + 0.9))
    *panels, beside = figure.subplots(1, len(TARGETS) + 1, sharey=True)
    for number, (axes, target) in enumerate(zip(panels, TARGETS, strict=True)):
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
        axes.set_title("\n".join(textwrap.wrap(target.title, 26)))
        axes.set_xlabel("fraction of Adam's run")
        _ticks(axes.xaxis, 5, _plain)
    column = judged_by(entries[0].runs)
    for row, entry in enumerate(entries):
        ends = entry.end(column)
        beside.plot(ends, [row] * len(ends), "o", color=COLOURS[2], markerfacecolor="white", markersize=3)
        if ends:
            beside.plot(spread(ends).mean, row, "|", color=COLOURS[2], markersize=9, markeredgewidth=2)
    beside.set_title(f"final\n{WORDS[column]}")
    _ticks(beside.xaxis, 4, _percent if column == "accuracy" else _plain)
    for axes in (*panels, beside):
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(entries)), [entry.name for entry in entries])
    panels[0].set_ylim(len(entries) - 0.45, -0.55)
    for label, entry in zip(panels[0].get_yticklabels(), entries, strict=True):
        label.set_fontweight("bold" if "CProp" in entry.name else "normal")
    _entitle(figure, title)
    _legend(figure, _bar_handles(), "bar: median over seeds; dots: single seeds; shorter is better; bold: with CProp")
    return figure


# Files.

PIXELS_AN_INCH: Final = 150


def to_svg(figure: Figure) -> str:
    """As an ``<svg>`` element to put into a page; the same figure gives the same text."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _styled():
        figure.savefig(stream, format="svg", dpi=PIXELS_AN_INCH, metadata=nothing)
    text = stream.getvalue()
    return text[text.index("<svg") :]  # without the prologue of a file


def save(figure: Figure, path: Path) -> None:
    """Write a figure, as its file's ending says.

    Raises:
        ValueError: if that is neither .png nor .svg.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: figures are written as .png or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(to_svg(figure), encoding="utf-8")
        return
    with _styled():
        figure.savefig(path, dpi=PIXELS_AN_INCH, metadata={"Software": None})
