"""Cost of a ``cprop.Monitor`` sample relative to training steps: ``python -m benchmarks.monitor``.

The paper's networks on random data of the right shape, with batches of 32 and fused CPropAdam. Steps with and without
a monitor take turns, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cprop
from cprop_lab.models import convolutional, fully_connected, vgg11

EVERY = 100
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "fully-connected": (fully_connected, (1, 28, 28), 30),
    "convolutional": (convolutional, (1, 28, 28), 30),
    "VGG11": (vgg11, (3, 32, 32), 5),
}


def milliseconds(function: Callable[[], object], times: int) -> float:
    """The median time of several calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], times: int) -> dict[str, float]:
    """The time of a step without a monitor and with an idle one, and the time of a sample."""
    torch.manual_seed(0)
    model = make()
    optimizer = cprop.CPropAdam(model.parameters(), fused=True)
    inputs, labels = torch.randn(32, *shape), torch.randint(0, 10, (32,))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step()
    rounds = []
    for _ in range(5):
        plain = milliseconds(step, times)
        monitor = cprop.Monitor(optimizer, model.named_parameters(), every=10**9, batch_size=32)
        waiting = milliseconds(step, times)
        monitor.sample()  # the first one compiles
        sample = milliseconds(monitor.sample, max(3, times // 3))
        monitor.close()
        rounds.append((plain, waiting, sample))
    plain, waiting, sample = (statistics.median(column) for column in zip(*rounds, strict=True))
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "step_ms": plain,
        "waiting_ms": waiting,
        "sample_ms": sample,
        "share": sample / (EVERY * plain),
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    found = {name: measure(*network) for name, network in NETWORKS.items()}
    table = Table(
        "network",
        "parameters",
        "training step, ms",
        "with a monitor that waits, ms",
        "a sample, ms",
        f"every {EVERY} steps",
    )
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['parameters']:,}",
            *(f"{row[k]:.2f}" for k in ("step_ms", "waiting_ms", "sample_ms")),
            f"{row['share']:.2%}",
        )
    Console().print(table)
    if arguments.json:
        about = {"torch": torch.__version__, "cprop": cprop.__version__, "threads": arguments.threads, "every": EVERY}
        arguments.json.write_text(json.dumps({**about, "networks": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
