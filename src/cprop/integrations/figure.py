"""Plots the scale over time per layer, like figure 8 of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from cprop.diagnostics.summary import BINS, Sample

__all__ = ["scale_over_time"]


def scale_over_time(samples: Sequence[Sample], title: str = "") -> Figure:
    """Plot the distribution of the scale over time, for all layers together and for each, with the mean as a line.

    Args:
        samples: a monitor's samples, ``monitor.samples``.
        title: title of the figure.

    Raises:
        ValueError: if there are fewer than two samples.

    Example:
        >>> from cprop.diagnostics.summary import Layer
        >>> layer = Layer(2, 0.5, (1 / BINS,) * BINS, 0.0, 0.0, signal=1.0, noise=4.0, signal_error=0.1)
        >>> figure = scale_over_time([Sample(step, layer, {"fc": layer}) for step in (1, 2, 3)])
        >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
        ['all layers', 'fc']
    """
    if len(samples) < 2:
        raise ValueError(f"got {len(samples)} samples: a figure over time needs at least 2")
    steps = np.array([sample.step for sample in samples], dtype=float)
    edges = np.concatenate([[steps[0]], (steps[1:] + steps[:-1]) / 2, [steps[-1]]])
    shown = {"all layers": [sample.total for sample in samples]}
    for name in samples[-1].layers:
        if all(name in sample.layers for sample in samples):
            shown[name] = [sample.layers[name] for sample in samples]
    columns = min((min(3, len(shown)), 2, 4), key=lambda number: -len(shown) % number)  # fewest empty plots
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.1 * columns + 0.6, 2.1 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (name, layers) in zip(grid.flat, shown.items(), strict=False):
        shares = np.array([layer.histogram for layer in layers]).T
        drawn = axes.pcolormesh(
            edges, np.linspace(0, 1, BINS + 1), shares, norm=LogNorm(1e-3, 1.0, clip=True), cmap="cividis"
        )
        axes.plot(steps, [layer.mean_scale for layer in layers], color="white", linewidth=1.5)
        axes.set_title(name, loc="left", fontsize=9)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("scale")
    for axes in list(grid.flat)[: len(shown)][-columns:]:  # the lowest in each column
        axes.set_xlabel("steps")
        axes.xaxis.set_tick_params(labelbottom=True)
    bar = figure.colorbar(drawn, ax=list(grid.flat), aspect=40)
    bar.set_label("fraction of parameters; line: mean scale")
    if title:
        figure.suptitle(title)
    return figure
