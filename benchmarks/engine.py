"""Overhead of the engine: a sweep of equal runs on Ray, compared to the same runs in plain processes.

``python -m benchmarks.engine --data FOLDER`` takes about six minutes on two cores: two hundred runs of about two
seconds each, twice. The plain processes divide the runs beforehand, and use neither Ray nor intermediate checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BARE = """
import sys
from cprop_lab.engine.engine import Engine
from cprop_lab.engine.limits import Limits
from cprop_lab.store import Store
from cprop_lab.run.specification import Specification

runs = [Specification.from_json(text) for text in sys.argv[2:]]
Engine(Store(sys.argv[1]), executor="process", limits=Limits(checkpoint_seconds=1e9)).run(runs)
"""


def specifications(runs: int, iterations: int) -> list[Any]:
    """Runs of the convolutional network on Fashion-MNIST that differ only in their seed."""
    from cprop_lab.run.specification import Specification

    return [
        Specification(
            "fmnist-cnn",
            "cprop-adam",
            lr=3e-3,
            seed=seed,
            iterations=iterations,
            evaluate_every=max(1, iterations // 20),
            examples=max(1, iterations // 2),
        )
        for seed in range(runs)
    ]


def bare(runs: list[Any], processes: int) -> float:
    """Wall-clock time of the runs in plain processes, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        started = [
            subprocess.Popen(
                [sys.executable, "-c", BARE, folder, *(run.to_json() for run in runs[i::processes])],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for i in range(processes)
        ]
        if any(process.wait() for process in started):
            raise RuntimeError("a bare run failed")
        return time.perf_counter() - start


def on_ray(runs: list[Any]) -> float:
    """Wall-clock time of the runs as a sweep, in seconds, including Ray's start and shutdown."""
    from cprop_lab.engine.engine import Engine
    from cprop_lab.engine.live_table import LiveTable
    from cprop_lab.store import Store

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine = Engine(Store(folder), progress=LiveTable())
        engine.run(runs)
        engine.close()
        return time.perf_counter() - start


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds fashion_mnist (default: $CPROP_LAB_DATA)")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=70, help="so many take about two seconds on one core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["CPROP_LAB_DATA"] = str(arguments.data.absolute())
    processes = os.cpu_count() or 1
    runs = specifications(arguments.runs, arguments.iterations)
    result = {
        "runs": arguments.runs,
        "iterations": arguments.iterations,
        "processes": processes,
        "bare": bare(runs, processes),
        "ray": on_ray(runs),
    }
    result["ratio"] = result["ray"] / result["bare"]
    result["seconds_a_run"] = result["bare"] * processes / arguments.runs
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
