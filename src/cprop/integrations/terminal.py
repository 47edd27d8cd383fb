"""Shows a monitor's last sample and its advice in the terminal."""

from __future__ import annotations

import math

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cprop.diagnostics.monitor import Monitor, Sink
from cprop.diagnostics.summary import Layer, Sample

__all__ = ["printer", "table"]

BARS = " ▁▂▃▄▅▆▇█"


def table(monitor: Monitor) -> Group:
    """A monitor's last sample as a table with one row per layer, followed by its advice.

    Args:
        monitor: a monitor with at least one sample.
    """
    sample = monitor.samples[-1]
    shown = Table("layer", "parameters", "mean scale", "scales from 0 to 1", "eps", "signal / noise", box=None)
    if sample.batch_size is not None:
        shown.add_column("noise scale")
    for name, layer in {**sample.layers, "all": sample.total}.items():
        shown.add_row(*_cells(name, layer, sample))
    for column in shown.columns[1:]:
        column.justify = "right"
    lines = [Text(line, style="yellow") for line in monitor.advice()]
    return Group(Text(f"CProp, step {sample.step:,}", style="bold"), shown, *lines)


def _cells(name: str, layer: Layer, sample: Sample) -> list[str]:
    highest = max(layer.histogram) or 1.0
    # Two bins per character; the square root makes small fractions visible.
    pairs = [sum(layer.histogram[i : i + 2]) for i in range(0, len(layer.histogram), 2)]
    bars = "".join(BARS[min(8, math.ceil(8 * math.sqrt(share / (2 * highest))))] for share in pairs)
    cells = [name, f"{layer.elements:,}", f"{layer.mean_scale:.3f}", bars]
    cells += [f"{100 * layer.eps_dominates:.0f} %", f"{layer.signal_to_noise:.2g}"]
    if sample.batch_size is not None:
        cells.append(f"{layer.noise_scale(sample.batch_size):,.0f}")
    return cells


def printer(console: Console | None = None) -> Sink:
    """A sink that prints one line per sample, with the totals over all layers.

    Args:
        console: the console to print to; by default the terminal.
    """
    target = console or Console()

    def sink(sample: Sample) -> None:
        cells = _cells("", sample.total, sample)
        target.print(f"CProp, step {sample.step:,}: mean scale {cells[2]} {cells[3]} signal / noise {cells[5]}")

    return sink
