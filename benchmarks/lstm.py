"""Compares the laboratory's LSTM to torch's on a CPU: ``python -m benchmarks.lstm``.

The three LSTM layers of AWD-LSTM, forward and backward, on random input with a batch's shape. The two take turns, so
that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.monitor import milliseconds
from cprop_lab.models import AWDLSTM
from cprop_lab.models.lstm import LSTM

TIME, BATCH = 35, 32
ROUNDS = 5


def measure(precision: torch.dtype) -> dict[str, float]:
    """Time of both in milliseconds, forward and backward."""
    torch.manual_seed(0)
    layers = [layer for layer in AWDLSTM().lstms if isinstance(layer, LSTM)]
    inputs = [torch.randn(TIME, BATCH, layer.input_size, requires_grad=True) for layer in layers]
    states = [torch.zeros(1, BATCH, layer.hidden_size) for layer in layers]

    def run(kind: type[nn.LSTM]) -> None:
        for layer, x, state in zip(layers, inputs, states, strict=True):
            with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
                y, _ = kind.forward(layer, x, (state, state))
            y.backward(torch.ones_like(y))

    kinds = {"torch": nn.LSTM, "laboratory": LSTM}
    for kind in kinds.values():
        run(kind)
    rounds = [{name: milliseconds(lambda k=kind: run(k), 1) for name, kind in kinds.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(found[name] for found in rounds) for name in kinds}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--threads", type=int, default=1, help="a run of the laboratory has one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {str(precision).removeprefix("torch."): measure(precision) for precision in (torch.float32, torch.bfloat16)}
    table = Table("", "torch's LSTM, ms", "the laboratory's, ms")
    for precision, row in found.items():
        table.add_row(precision, *(f"{ms:.0f}" for ms in row.values()))
    Console().print(table)
    if arguments.json:
        about = {"torch": torch.__version__, "threads": arguments.threads, "time": TIME, "batch": BATCH}
        arguments.json.write_text(json.dumps({**about, "ms": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
