"""How figures look, on the pages and in the gallery, so that no script has to say it."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

# The laboratory's colours (Okabe and Ito), which readers who see few colours can tell apart.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "0.4",
    "axes.grid": True,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "figure.figsize": (8.0, 3.2),
    "font.size": 10,
    "grid.color": "0.92",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 160,
    # The same bytes for the same figure.
    "svg.hashsalt": "cprop",
    "xtick.color": "0.3",
    "ytick.color": "0.3",
}


class ReadingOrder:
    """The scripts of the gallery in the order in which they are best read."""

    def __init__(self, folder: str) -> None:
        self.names = ("wrap_adam", "two_parameters", "monitor_by_layer", "noise_scale", "choosing_c")

    def __call__(self, file_name: str) -> int:
        """The place of a script."""
        return self.names.index(file_name.removesuffix(".py"))


def reset(gallery_conf: dict[str, Any], file_name: str) -> None:
    """Before and after every script of the gallery."""
    plt.close("all")
    mpl.rcdefaults()
    mpl.rcParams.update(STYLE)


def scrape_plain_figures(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Show figures that pyplot does not know of, such as those that the library makes, once each."""
    paths = []
    for value in block_vars["example_globals"].values():
        if (
            isinstance(value, Figure)
            and getattr(value, "number", None) is None
            and not hasattr(value, "shown_in_gallery")
        ):
            value.shown_in_gallery = True
            paths.append(next(block_vars["image_path_iterator"]))
            value.savefig(paths[-1])
    return figure_rst(paths, gallery_conf["src_dir"])
