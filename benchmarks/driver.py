"""The driver of a large sweep: CPU time per run and memory, on a real Ray, with runs that train for one step.

``python -m benchmarks.driver --runs 10000`` takes eight minutes on two busy cores. The runs are as short as can be, so
that the driver is as busy as it can be; what they cost is not measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cprop_lab import Task
from cprop_lab.engine.engine import Engine
from cprop_lab.engine.progress import Progress
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

STRETCHES = 10
"""Parts of the sweep that are compared."""


class Nothing(Task):
    """One parameter, and next to no data."""

    def data(self) -> tuple[Any, Any]:
        """Two examples."""
        return (torch.zeros(2, 1),), (torch.zeros(2, 1),)

    def model(self) -> nn.Module:
        """One parameter."""
        return nn.Linear(1, 1, bias=False)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Zero."""
        loss: Tensor = model(*batch).mean()
        return loss


class Clock(Progress):
    """Notes the CPU time and the peak memory of this process each time another part of the runs has ended."""

    def __init__(self, runs: int) -> None:
        self.every, self.ended_runs = max(1, runs // STRETCHES), 0
        self.seen: list[tuple[float, float]] = []

    def look(self) -> None:
        """Note them now."""
        self.seen.append((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    def waiting(self, what: str = "") -> None:
        """Ray has been started once there is nothing to wait for."""
        if not what:
            self.look()

    def ended(self, specification: Specification) -> None:
        """Count a run."""
        self.ended_runs += 1
        if self.ended_runs % self.every == 0:
            self.look()


def main() -> None:
    """Measure one sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to this file")
    arguments = parser.parse_args()
    base = Specification("benchmarks.driver:Nothing", "sgd", lr=0.1, batch_size=1, iterations=1, examples=1)
    clock = Clock(arguments.runs)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Store(folder), eager=True, progress=clock)
        finished = len(engine.run([base.replace(seed=seed) for seed in range(arguments.runs)]))
        engine.close()
    cpu = [1e3 * (after - before) / clock.every for (before, _), (after, _) in pairwise(clock.seen)]
    result = {
        "runs": finished,
        "ms_per_run": 1e3 * (clock.seen[-1][0] - clock.seen[0][0]) / finished,
        "ms_per_run_by_stretch": cpu,
        "peak_mib_by_stretch": [memory for _, memory in clock.seen],
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        rows = [*(row for row in rows if row["runs"] != finished), result]
        arguments.json.write_text(json.dumps(sorted(rows, key=lambda row: row["runs"]), indent=2) + "\n")


if __name__ == "__main__":
    main()
