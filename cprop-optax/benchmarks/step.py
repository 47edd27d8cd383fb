"""What a step costs: ``python benchmarks/step.py``.

Each optimizer takes its turn on parameters of its own, round after round, so that whatever else the
machine is doing falls on all rows alike. A step is one jitted call, update and ``apply_updates``
together, with parameters and state donated. Ratios are to ``optax.adam``.

On a busy machine ``taskset -c 0 python benchmarks/step.py --clock cpu`` is steadier: it counts the seconds that one
core spends on the step, and not those that it spends on others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cprop_optax

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the PyTorch library's lists of parameters; shapes.py imports nothing

from benchmarks.shapes import SHAPES  # noqa: E402

REFERENCE = "optax.adam"
LEARNING_RATE = 1e-6
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ROWS: dict[str, Callable[[], optax.GradientTransformation]] = {
    REFERENCE: lambda: optax.adam(LEARNING_RATE),
    "optax.sgd": lambda: optax.sgd(LEARNING_RATE),
    "cprop(adam)": lambda: cprop_optax.cprop(optax.adam(LEARNING_RATE)),
    "scale_by_cprop_adam": lambda: optax.chain(
        cprop_optax.scale_by_cprop_adam(), optax.scale_by_learning_rate(LEARNING_RATE)
    ),
    "cprop(adam), bfloat16 moments": lambda: cprop_optax.cprop(optax.adam(LEARNING_RATE), moment_dtype="bfloat16"),
    "cprop(adam), logistic": lambda: cprop_optax.cprop(optax.adam(LEARNING_RATE), measure="logistic"),
    "cprop(sgd)": lambda: cprop_optax.cprop(optax.sgd(LEARNING_RATE)),
    "schedule_free(adam)": lambda: optax.contrib.schedule_free(
        optax.adam(LEARNING_RATE, b1=0.0), LEARNING_RATE, b1=0.9
    ),
}


class Turns:
    """One optimizer, its parameters and its compiled step."""

    def __init__(self, optimizer: optax.GradientTransformation, params: Any) -> None:
        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.params = jax.tree.map(jnp.copy, params)
        # Copied, because a buffer can be donated once and two leaves of zeros may share one.
        self.state = jax.tree.map(jnp.copy, optimizer.init(params))
        self.step = step

    def take(self, grads: Any, clock: Callable[[], float]) -> float:
        """One step, and the seconds it took."""
        start = clock()
        self.params, self.state = jax.block_until_ready(self.step(self.params, self.state, grads))
        return clock() - start

    def state_bytes(self) -> int:
        """Bytes kept between two steps, parameters aside."""
        return sum(x.nbytes for x in jax.tree.leaves(self.state))


def measure(shape: str, rounds: int, names: list[str], clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Time the named optimizers on one list of parameters, in turns."""
    generator = np.random.default_rng(0)
    sizes = SHAPES[shape]()

    def numbers(size: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(0.01 * generator.standard_normal(size, dtype=np.float32))

    params = [numbers(size) for size in sizes]
    # Three sets in turn: with one and the same gradient there would be no variance to take a root of.
    gradients = [[numbers(size) for size in sizes] for _ in range(3)]
    elements = sum(p.size for p in params)
    turns = {name: Turns(ROWS[name](), params) for name in names}
    first = {name: turn.take(gradients[0], clock) for name, turn in turns.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name, turn in turns.items():
            times[name].append(turn.take(gradients[i % 3], clock))
    rows = []
    for name, turn in turns.items():
        low, median, high = statistics.quantiles(times[name], n=4)
        # Round by round, so that a busy stretch of the machine falls on both sides of the quotient.
        ratios = [a / b for a, b in zip(times[name], times[REFERENCE], strict=True)]
        rows.append(
            {
                "shape": shape,
                "name": name,
                "median_ms": round(1e3 * median, 3),
                "quartiles_ms": [round(1e3 * low, 3), round(1e3 * high, 3)],
                "ratio": round(median / statistics.median(times[REFERENCE]), 3),
                "ratio_by_round": round(statistics.median(ratios), 3),
                "first_step_s": round(first[name], 2),
                "state_bytes_per_parameter": round(turn.state_bytes() / elements, 2),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["25M"], help="parameter lists to run")
    parser.add_argument("--rounds", type=int, default=31, help="turns that every optimizer gets")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only rows whose name contains one of these")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="seconds of the clock, or of the processor")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    names = [name for name in ROWS if name == REFERENCE or not arguments.only or any(t in name for t in arguments.only)]
    rows = []
    load = os.getloadavg()[0]
    for shape in arguments.shapes:
        rows += measure(shape, arguments.rounds, names, CLOCKS[arguments.clock])
        for row in (row for row in rows if row["shape"] == shape):
            print(
                f"{shape:>16}  {row['name']:<30} {row['median_ms']:9.2f} ms  ratio {row['ratio']:.2f}  "
                f"by round {row['ratio_by_round']:.2f}  state {row['state_bytes_per_parameter']:.1f} B/parameter"
            )
    if arguments.json:
        report = {
            "command": " ".join(["python", "benchmarks/step.py", *sys.argv[1:]]),
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "optax": optax.__version__,
                "cprop_optax": cprop_optax.__version__,
            },
            "machine": {
                "backend": jax.default_backend(),
                "cpu": platform.processor() or platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "load_before": round(load, 2),
            },
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
