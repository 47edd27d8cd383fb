"""The store at size: CPU time per run and peak memory of commands that train nothing.

``python -m benchmarks.store`` fills a store with synthetic runs, one experiment with many seeds. It times ``run``
(which finds all of them finished), ``plot``, ``report`` and ``pack``, each as a process of its own; then the first
three again, from the packed experiment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

EVALUATIONS = 11
EXPERIMENT, PRESET = "fmnist-fc", "smoke"


def fill(folder: Path, runs: int) -> int:
    """Write about so many runs of an experiment, as if they had been trained, and return the number of seeds."""
    import numpy as np

    from cprop_lab.experiments import EXPERIMENTS, PRESETS
    from cprop_lab.run.evaluation import BINS
    from cprop_lab.store import Store

    experiment = EXPERIMENTS[EXPERIMENT]
    seeds = max(2, runs // len(experiment.variants))
    store, random = Store(folder), np.random.default_rng(0)
    made = {"torch": "0", "commit": "0", "device": "cpu", "machine": "none", "threads": 1, "cprop": "0", "python": "0"}
    for specification in experiment.specifications(replace(PRESETS[PRESET], seeds=seeds), {}):
        specification = specification.eager()
        steps = np.linspace(0, specification.iterations, EVALUATIONS).astype(int)
        losses = np.linspace(2, 1, EVALUATIONS) * random.uniform(0.9, 1.1, EVALUATIONS)
        scaled = {"mean_scale": 0.5, "scale_histogram": [1 / BINS] * BINS} if "cprop" in specification.optimizer else {}
        rows: list[Any] = [
            {
                "step": int(step),
                "seconds": 0.01 * step,
                "train_loss": loss,
                "test_loss": loss,
                "accuracy": 0.5,
                "lr": 0.1,
            }
            | scaled
            for step, loss in zip(steps, losses.tolist(), strict=True)
        ]
        store.write(specification, "finished", rows, made)
    return seeds


def timed(*words: str, cwd: Path) -> dict[str, float]:
    """A command's CPU seconds and peak memory in MiB."""
    with (cwd / "log").open("w+") as log:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "cprop_lab", *words, "--storage", str(cwd / "store")],
            {**os.environ, "OMP_NUM_THREADS": "1"},
            file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)],
        )
        _, status, used = os.wait4(process, 0)
        if status:
            raise RuntimeError(f"{' '.join(words)} failed: {(cwd / 'log').read_text()}")
    return {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


def measure(runs: int) -> list[dict[str, Any]]:
    """All commands at one size."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own: the memory of this one would count as that of the processes it starts.
        filling = [sys.executable, "-m", "benchmarks.store", "--fill", str(folder / "store"), "--runs", str(runs)]
        seeds = int(subprocess.run(filling, check=True, capture_output=True, text=True).stdout)
        out = folder / "report.html"
        commands = {
            "run, nothing to do": (
                *("run", EXPERIMENT, "--preset", PRESET, "--paper-rates", "--eager", "--executor", "process"),
                *("--seeds", str(seeds)),
            ),
            "plot": ("plot",),
            "report": ("report", "--out", str(out)),
            "pack": ("pack",),
        }
        for packed in (False, True):
            for title, words in list(commands.items())[: 3 if packed else 4]:
                rows.append({"runs": runs, "packed": packed, "command": title, **timed(*words, cwd=folder)})
                if title == "report":
                    rows[-1]["page_kib"] = out.stat().st_size / 1024
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure at several sizes; the first, with hardly any runs, says what starting takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--fill", type=Path, metavar="FOLDER", help="only fill a store, and print the number of seeds")
    arguments = parser.parse_args()
    if arguments.fill:
        print(fill(arguments.fill, arguments.runs[0]))
        return
    result = {"evaluations": EVALUATIONS, "rows": [row for runs in arguments.runs for row in measure(runs)]}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
