"""What limits a fused step: ``python -m benchmarks.limits``.

CPropAdam's rule is recompiled without each of its parts, and all variants take turns on the same 25 M
parameters. The cost of a part is the time saved without it. A list of tiny parameters measures the
time that a step spends in Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import cprop
from benchmarks.shapes import SHAPES
from cprop.execution import Implementation, Job, prepare, run_all
from cprop.measures import nearly_normal

NAMES = ("param", "exp_avg", "exp_avg_sq", "cprop_m")


class Scalars(NamedTuple):
    """Scalars with values as in mid-training."""

    weight: float = 1e-3
    beta: float = 0.999
    step_size: float = 1e-6
    eps: float = 1e-8
    k_v: float = 0.002
    k_m: float = 0.001


class Flags(NamedTuple):
    """What to leave out."""

    part: str
    measure: str = "normal"


def variant(x: Mapping[str, Tensor], h: Scalars, flags: Flags) -> dict[str, Tensor]:
    """CPropAdam's rule at c = 1, without one of its parts."""
    g, leave_out = x["grad"], flags.part
    if leave_out == "all arithmetic":
        return {name: x[name] + g * h.step_size for name in NAMES}
    mean = x["exp_avg"] + h.weight * (g - x["exp_avg"])
    square = x["exp_avg_sq"] * h.beta + h.weight * g * g
    m = x["cprop_m"] + h.weight * (g - x["cprop_m"])
    denominator = torch.sqrt(square) + h.eps
    updated = {"exp_avg": mean, "exp_avg_sq": square, "cprop_m": m}
    if leave_out == "the scale":
        return {**updated, "param": x["param"] - h.step_size * mean / denominator}
    variance = torch.relu(square * h.k_v - m * m * h.k_m)
    error = (variance if leave_out == "the root of the variance" else torch.sqrt(variance)) + h.eps
    z = torch.abs(m) + error if leave_out == "the division by the standard error" else torch.abs(m) / error
    scale = torch.clamp_max(z if leave_out == "the normal distribution" else nearly_normal(z), 1.0)
    return {**updated, "param": x["param"] - h.step_size * (scale * mean) / denominator}


PARTS = (
    "nothing",
    "the normal distribution",
    "the root of the variance",
    "the division by the standard error",
    "the scale",
    "all arithmetic",
)


def median(times: list[float]) -> float:
    """The median time in milliseconds."""
    return 1e3 * statistics.median(times)


def kernels(rounds: int) -> dict[str, float]:
    """Time in milliseconds of each variant and of fused Adam, for 25 M parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES["25M"]() if len(shape) == 2]
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    gradients = [0.01 * torch.randn(p.shape, generator=generator) for p in params]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    adam = torch.optim.Adam(params, lr=1e-6, fused=True)
    adam.step()
    h = Scalars()

    def step(part: str) -> Callable[[], object]:
        moments = [[adam.state[p][name] for name in ("exp_avg", "exp_avg_sq")] for p in params]
        rows = [(g, p, *m, 0.1 * g) for g, p, m in zip(gradients, params, moments, strict=True)]
        job = Job(("grad", *NAMES), rows, h, 1.0)
        return lambda: run_all(prepare(variant, [job], Flags(part), Implementation.FUSED))

    steps: dict[str, Callable[[], Any]] = {"torch Adam, fused": adam.step, **{part: step(part) for part in PARTS}}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.no_grad():
        for function in steps.values():
            function()
        for _ in track(range(rounds), description="kernels"):
            for name, function in steps.items():
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def python(rounds: int) -> dict[str, float]:
    """Microseconds per parameter that a step spends outside its arithmetic."""
    results = {}
    for name, build in {
        "torch Adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
        "CPropAdam, fused": lambda ps: cprop.CPropAdam(ps, fused=True),
    }.items():
        at = {}
        for count in (1, 101):
            params = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
            for p in params:
                p.grad = torch.ones(4)
            optimizer = build(params)
            optimizer.step()
            times = []
            for _ in range(10 * rounds):
                start = time.perf_counter()
                optimizer.step()
                times.append(time.perf_counter() - start)
            at[count] = median(times)
        results[name] = 1e3 * (at[101] - at[1]) / 100
    return results


def main() -> None:
    """Run the measurement from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="turns that every variant gets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    milliseconds, microseconds = kernels(arguments.rounds), python(arguments.rounds)
    console = Console()
    table = Table(title="CPropAdam's kernel over 25 M parameters, without ...")
    for heading in ("without", "ms", "against fused Adam"):
        table.add_column(heading, justify="right")
    for name, value in milliseconds.items():
        table.add_row(name, f"{value:.2f}", f"{value / milliseconds['torch Adam, fused']:.2f}")
    console.print(table)
    for name, value in microseconds.items():
        console.print(f"{name}: {value:.1f} µs a parameter besides its arithmetic")
    if arguments.json:
        report = {"torch": torch.__version__, "cprop": cprop.__version__, "rounds": arguments.rounds}
        report |= {"kernel_ms": milliseconds, "python_us_per_parameter": microseconds}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
