"""What all figures share: the style, one look per optimizer, legends, ticks, and files.

Figures are made without pyplot, so they need no display and need not be closed.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import colors, style, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cprop_lab.analysis.groups import Kin, kin
from cprop_lab.run.specification import Specification

__all__ = [
    "COLOURS",
    "NARROW",
    "STYLE",
    "WIDTH",
    "Look",
    "entitle",
    "legend",
    "logarithmic",
    "looks",
    "name_rows",
    "percent",
    "plain",
    "save",
    "styled",
    "thousands",
    "ticks",
    "to_svg",
]

Look = dict[str, Any]
"""How a line is drawn, as keyword arguments of matplotlib."""


WIDTH: Final = 9.0
"""In inches: at 100 pixels per inch, the width of a README's column."""


NARROW: Final = 5.4
"""Of what a phone should show whole."""


# From Okabe and Ito's palette, which colour-blind people can tell apart; without yellow, which is too light for a line
# on white, and black, which is reserved for what belongs to no optimizer.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


SHADES: Final = ("YlGnBu", "YlOrRd", "YlGn", "RdPu", "YlOrBr", "PuBu")
"""The colour maps of matplotlib closest to these colours."""


MARKERS: Final = ("", "o", "s", "^")
"""Used in turn where there are more optimizers than colours."""


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
styled = partial(style.context, dict(STYLE), after_reset=True)


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


def entitle(figure: Figure, title: str) -> None:
    """Put a title above a figure, if there is one."""
    if title:
        # About ten letters of this size fit into an inch.
        figure.suptitle("\n".join(textwrap.wrap(title, int(10 * figure.get_figwidth()))), fontsize=11)


def legend(
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


def name_rows(panels: Sequence[Axes], names: Sequence[str]) -> None:
    """A row for each name, from top to bottom, in panels that share it; names with CProp are bold."""
    for axes in panels:
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), [textwrap.fill(name, 32) for name in names])
    panels[0].set_ylim(len(names) - 0.45, -0.55)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if "CProp" in name else "normal")


def ticks(axis: Axis, number: int, text: Callable[[float], str]) -> None:
    """About so many ticks, at round numbers."""
    axis.set_major_locator(ticker.MaxNLocator(number, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def plain(value: float) -> str:
    """A tick's number."""
    return f"{value:.6g}"


def percent(value: float) -> str:
    """A tick's share."""
    return f"{100 * value:.6g} %"


def thousands(value: float) -> str:
    """A tick's number of iterations."""
    return f"{value / 1000:.6g}k" if value >= 1000 else plain(value)


def logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float, number: int = 6) -> None:
    """A logarithmic axis with plain numbers at its ticks; matplotlib's are powers of ten, often one or none."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    decades = math.log10(high / low)
    ticks(axis, number, plain)  # for a range with hardly a power of ten in it
    if decades > 0.6:
        # Only powers of ten, where there are enough of them.
        per_tick = decades / number
        subs = (1, 2, 5) if per_tick < 0.25 else (1, 3) if per_tick < 0.42 else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=number))
    axis.set_minor_formatter(ticker.NullFormatter())


DPI: Final = 150


def to_svg(figure: Figure) -> str:
    """As an ``<svg>`` element to put into a page; the same figure gives the same text."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with styled():
        figure.savefig(stream, format="svg", dpi=DPI, metadata=nothing)
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
    with styled():
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
