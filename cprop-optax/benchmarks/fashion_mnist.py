"""The example's curves against the PyTorch library's: ``python benchmarks/fashion_mnist.py --json FILE``.

Both train the paper's fully-connected network with CProp around Adam, each from random numbers of its own. The means
over the seeds are compared at every evaluation, as t: their difference in standard errors, which the spread over the
seeds gives. Plain Adam is the control: a comparison that could not tell it from CProp would show nothing. Needs the
extra ``lab`` of the PyTorch library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import optax

import cprop_optax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import fashion_mnist as example  # noqa: E402
from cprop_lab.run.specification import Specification  # noqa: E402
from cprop_lab.run.training import Training, arithmetic  # noqa: E402

METRICS = ("train_loss", "test_loss", "accuracy", "mean_scale")
LEARNING_RATE = 1e-3
# 95 % of all t with four degrees of freedom, as two groups of three have, are below this.
T_95 = 2.776

Curves = list[dict[str, float]]


def with_torch(seed: int, iterations: int, every: int) -> Curves:
    """A run of the PyTorch library's laboratory, evaluated on all images."""
    training = Training(
        Specification("fmnist-fc", "cprop-adam", lr=LEARNING_RATE, seed=seed, iterations=iterations, examples=60_000)
    )
    rows = []
    with arithmetic():
        for _ in range(0, iterations, every):
            training.advance(every)
            row = training.evaluate()
            rows.append({"step": row["step"]} | {name: row[name] for name in METRICS})
    return rows


def with_jax(optimizer: optax.GradientTransformation, data: object, seed: int, iterations: int, every: int) -> Curves:
    """A run of the example."""
    return [row._asdict() for row in example.train(optimizer, data, seed, iterations, every)]


def differences(a: list[Curves], b: list[Curves], name: str) -> dict[str, list[float]]:
    """The difference of two groups' means at each evaluation, and that in standard errors."""
    difference, t = [], []
    for rows_a, rows_b in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True):
        x, y = [row[name] for row in rows_a], [row[name] for row in rows_b]
        error = (statistics.variance(x) / len(x) + statistics.variance(y) / len(y)) ** 0.5
        difference.append(round(statistics.mean(x) - statistics.mean(y), 5))
        t.append(round((statistics.mean(x) - statistics.mean(y)) / error, 2))
    return {"difference": difference, "t": t, "share of |t| below t_95": sum(abs(v) < T_95 for v in t) / len(t)}


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds fashion_mnist (default: $CPROP_LAB_DATA)")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="write the curves and the comparison")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["CPROP_LAB_DATA"] = str(arguments.data.absolute())
    data = example.read(arguments.data)
    length = arguments.iterations, arguments.every
    curves: dict[str, list[Curves]] = {"jax, cprop(adam)": [], "torch, CProp(Adam)": [], "jax, adam": []}
    for seed in range(arguments.seeds):
        curves["jax, cprop(adam)"].append(with_jax(cprop_optax.cprop(optax.adam(LEARNING_RATE)), data, seed, *length))
        curves["torch, CProp(Adam)"].append(with_torch(seed, *length))
        curves["jax, adam"].append(with_jax(optax.adam(LEARNING_RATE), data, seed, *length))
        print(f"seed {seed}: { ({name: runs[-1][-1] for name, runs in curves.items()}) }", flush=True)
    ours, theirs, control = curves.values()
    report = {
        "command": f"python benchmarks/fashion_mnist.py --iterations {length[0]} --every {length[1]} "
        f"--seeds {arguments.seeds} --json FILE",
        "versions": {name: version(name) for name in ("jax", "optax", "torch", "cprop", "cprop-optax")},
        "t_95": T_95,
        "jax against torch": {name: differences(ours, theirs, name) for name in METRICS},
        "control, adam against torch's CProp": {name: differences(control, theirs, name) for name in METRICS[:3]},
        "curves": curves,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for name in METRICS:
        print(name, report["jax against torch"][name]["t"])


if __name__ == "__main__":
    main()
