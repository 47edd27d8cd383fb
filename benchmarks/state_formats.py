"""Training loss by storage format of the state: ``python -m benchmarks.state_formats``.

The paper's fully connected network on Fashion-MNIST with CPropAdam, at the paper's learning rate. A
format is good enough if its effect is smaller than that of the seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cprop
from benchmarks.fashion_mnist import Training, add_arguments, training_images
from cprop.storage import FORMATS

STRETCH = 250


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, iterations=10_000)
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them as a picture")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    images, labels = training_images(arguments.data)
    curves: dict[str, list[list[tuple[int, float, float]]]] = {}
    finals: dict[str, list[float]] = {}
    for storage in FORMATS:
        curves[storage], finals[storage] = [], []
        for seed in range(arguments.seeds):
            training = Training(
                images, labels, seed, lambda ps, s=storage: cprop.CPropAdam(ps, fused=True, cprop_state_dtype=s)
            )
            for _ in track(range(arguments.iterations // STRETCH), description=f"{storage}, seed {seed}"):
                training.advance(STRETCH)
            curves[storage].append(training.curve)
            finals[storage].append(training.loss())
    table = Table(title=f"Training loss after {arguments.iterations:,} iterations, {arguments.seeds} seeds")
    for heading in ("state", "mean", "standard deviation", "by seed"):
        table.add_column(heading, justify="right")
    for storage, losses in finals.items():
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        table.add_row(storage, f"{statistics.mean(losses):.4f}", f"{spread:.4f}", ", ".join(f"{x:.4f}" for x in losses))
    Console().print(table)
    if arguments.json:
        report = {"torch": torch.__version__, "cprop": cprop.__version__, "iterations": arguments.iterations}
        arguments.json.write_text(json.dumps({**report, "final": finals, "curves": curves}) + "\n")
    if arguments.chart:
        draw(curves, arguments.chart)


def draw(curves: dict[str, list[list[tuple[int, float, float]]]], path: Path) -> None:
    """Draw one line per run, with one color per format."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for colour, (storage, runs) in zip(("#1f6fb4", "#d1772c"), curves.items(), strict=True):
        for run in runs:
            iterations, _, losses = zip(*run, strict=True)
            axes.plot(iterations, losses, color=colour, linewidth=1, alpha=0.8)
        axes.plot([], [], color=colour, label=storage)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("iterations")
    axes.set_ylabel("training loss")
    axes.legend(title="state", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
