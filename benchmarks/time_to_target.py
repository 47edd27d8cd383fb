"""Seconds to reach a training loss, with and without CProp: ``python -m benchmarks.time_to_target``.

The target is the final loss of the plain optimizer at the paper's learning rate. The two take turns of
250 iterations, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cprop
from benchmarks.fashion_mnist import Training, add_arguments, training_images

PAIRS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD 0.1": (
        lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
        lambda ps: cprop.CPropSGD(ps, lr=0.1, fused=True),
    ),
    "Adam 1e-3": (
        lambda ps: torch.optim.Adam(ps, lr=1e-3, fused=True),
        lambda ps: cprop.CPropAdam(ps, lr=1e-3, fused=True),
    ),
}
STRETCH = 250


def to_target(training: Training, target: float) -> tuple[int, float] | None:
    """Iterations and seconds until the mean of four recorded losses first reaches the target."""
    losses = [loss for *_, loss in training.curve]
    for i in range(3, len(losses)):
        if sum(losses[i - 3 : i + 1]) / 4 <= target:
            return training.curve[i][0], training.curve[i][1]
    return None


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, iterations=20_000)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    images, labels = training_images(arguments.data)
    # Compile before timing: this happens once per rule and machine.
    for _, scaled in PAIRS.values():
        Training(images[:64], labels[:64], 0, scaled).advance(2)

    results = []
    for name, makers in PAIRS.items():
        for seed in range(arguments.seeds):
            plain, scaled = (Training(images, labels, seed, make) for make in makers)
            for _ in track(range(arguments.iterations // STRETCH), description=f"{name}, seed {seed}"):
                plain.advance(STRETCH)
                scaled.advance(STRETCH)
            target = plain.loss()
            reached = to_target(scaled, target)
            results.append(
                {
                    "optimizer": name,
                    "seed": seed,
                    "target": target,
                    "plain": {"iterations": plain.iterations, "seconds": plain.seconds, "curve": plain.curve},
                    "cprop": {
                        "iterations": reached[0] if reached else None,
                        "seconds": reached[1] if reached else None,
                        "final_loss": scaled.loss(),
                        "all_seconds": scaled.seconds,
                        "curve": scaled.curve,
                    },
                    "speedup": plain.seconds / reached[1] if reached else None,
                }
            )
    table = Table(title=f"To the plain optimizer's training loss after {arguments.iterations:,} iterations")
    table.add_column("optimizer")
    for heading in ("seed", "target", "plain s", "CProp s", "CProp iterations", "times shorter"):
        table.add_column(heading, justify="right")
    for r in results:
        plain_s, scaled_s = f"{r['plain']['seconds']:.1f}", f"{r['cprop']['seconds'] or float('nan'):.1f}"
        iterations, speedup = str(r["cprop"]["iterations"]), f"{r['speedup'] or float('nan'):.2f}"
        table.add_row(r["optimizer"], str(r["seed"]), f"{r['target']:.4f}", plain_s, scaled_s, iterations, speedup)
    console = Console()
    console.print(table)
    for name in PAIRS:
        ratios = [r["speedup"] for r in results if r["optimizer"] == name and r["speedup"]]
        if ratios:
            console.print(
                f"{name}: {statistics.mean(ratios):.2f} times shorter in the mean, {min(ratios):.2f} at least"
            )
    if arguments.json:
        report = {"torch": torch.__version__, "cprop": cprop.__version__, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({**report, "results": results}) + "\n")


if __name__ == "__main__":
    main()
