"""The cost of a step: ``python -m benchmarks.step``.

The optimizers take turns on the same parameters and gradients, so that other load on the machine
affects all of them. Ratios are relative to torch's fused Adam.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import cprop
from benchmarks.authors import AuthorsCProp
from benchmarks.shapes import SHAPES
from cprop.execution import Implementation, Job, prepare, run_all

REFERENCE = "torch Adam, fused"
LARGE = 50_000_000
"""Number of parameters from which only the most relevant optimizers are run."""


@dataclass
class Row:
    """The measurements of one optimizer on one list of parameters."""

    shape: str
    name: str
    median_ms: float
    low_ms: float
    high_ms: float
    ratio: float
    first_step_s: float
    state_bytes_per_parameter: float
    temporary_bytes_per_parameter: float


class Amount(NamedTuple):
    """The only scalar of a bare loop."""

    value: float


NOTHING = Amount(0.0)


class Written(NamedTuple):
    """The tensors that a step writes."""

    names: tuple[str, ...]
    measure: str = "normal"


def bare(x: Mapping[str, Tensor], h: Amount, flags: Written) -> dict[str, Tensor]:
    """Read the gradient and the named tensors, and write the named tensors: a step's memory traffic only."""
    return {name: x[name] + x["grad"] * h.value for name in flags.names}


class Bare:
    """A compiled loop with only a step's memory traffic: the lower bound."""

    def __init__(self, params: list[Tensor], names: tuple[str, ...]) -> None:
        self.params, self.names = params, names
        self.state = {p: {name: torch.zeros_like(p) for name in names[1:]} for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Move the bytes."""
        rows = [(cast("Tensor", p.grad), p, *self.state[p].values()) for p in self.params]
        job = Job(("grad", *self.names), rows, NOTHING, 1.0)
        run_all(prepare(bare, [job], Written(self.names), Implementation.FUSED))


def schedule_free(params: list[Tensor]) -> Any:
    """Schedule-Free AdamW, in training mode."""
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(params, lr=1e-6)
    optimizer.train()
    return optimizer


def cautious(params: list[Tensor]) -> Any:
    """An Adam-like optimizer with the cautious mask."""
    import pytorch_optimizer

    return pytorch_optimizer.LaProp(params, lr=1e-6, cautious=True)


def eight_bit(params: list[Tensor]) -> Any:
    """Torchao's AdamW with 8-bit state."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-6)


ROWS: dict[str, Callable[[list[Tensor]], Any]] = {
    REFERENCE: lambda ps: torch.optim.Adam(ps, lr=1e-6, fused=True),
    "torch Adam, foreach": lambda ps: torch.optim.Adam(ps, lr=1e-6, foreach=True),
    "torch Adam, for-loop": lambda ps: torch.optim.Adam(ps, lr=1e-6, foreach=False),
    "torch SGD, fused": lambda ps: torch.optim.SGD(ps, lr=1e-6, fused=True),
    "torch SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=1e-6, foreach=True),
    "bare loop, the bytes of CPropAdam": lambda ps: Bare(ps, ("param", "exp_avg", "exp_avg_sq", "cprop_m")),
    "bare loop, the bytes of CPropSGD": lambda ps: Bare(ps, ("param", "cprop_m", "cprop_v")),
    "CPropAdam, fused": lambda ps: cprop.CPropAdam(ps, lr=1e-6, fused=True),
    "CPropAdam, bfloat16 state, fused": lambda ps: cprop.CPropAdam(
        ps, lr=1e-6, fused=True, cprop_state_dtype="bfloat16"
    ),
    "CPropAdam, foreach": lambda ps: cprop.CPropAdam(ps, lr=1e-6, foreach=True),
    "CPropAdam, for-loop": lambda ps: cprop.CPropAdam(ps, lr=1e-6, foreach=False),
    "CPropSGD, fused": lambda ps: cprop.CPropSGD(ps, lr=1e-6, fused=True),
    "CPropSGD, foreach": lambda ps: cprop.CPropSGD(ps, lr=1e-6, foreach=True),
    "CProp(Adam), fused": lambda ps: cprop.CProp(torch.optim.Adam(ps, lr=1e-6, fused=True)),
    "CProp(Adam), foreach": lambda ps: cprop.CProp(torch.optim.Adam(ps, lr=1e-6, foreach=True)),
    "authors' formulation around fused Adam": lambda ps: AuthorsCProp(torch.optim.Adam(ps, lr=1e-6, fused=True)),
    "Schedule-Free AdamW": schedule_free,
    "cautious LaProp (pytorch_optimizer)": cautious,
    "AdamW 8-bit (torchao)": eight_bit,
}
FEW = (
    REFERENCE,
    "torch Adam, for-loop",
    "torch SGD, fused",
    "bare loop, the bytes of CPropAdam",
    "bare loop, the bytes of CPropSGD",
    "CPropAdam, fused",
    "CPropAdam, bfloat16 state, fused",
    "CPropAdam, for-loop",
    "CPropSGD, fused",
    "CProp(Adam), fused",
    "Schedule-Free AdamW",
)


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Every plain tensor in a state, including those inside quantized tensors."""
    if isinstance(x, Mapping):
        for value in x.values():
            yield from tensors_in(value)
    elif isinstance(x, Tensor) and hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            yield from tensors_in(getattr(x, name))
    elif isinstance(x, Tensor):
        yield x


def state_bytes(optimizer: Any) -> int:
    """Bytes that an optimizer keeps between steps: its state, and the wrapper's copy of the parameters."""
    states = [
        optimizer.state,
        getattr(getattr(optimizer, "inner", None), "state", {}),
        getattr(optimizer, "_snapshots", {}),
    ]
    unique = {x.data_ptr(): x.numel() * x.element_size() for state in states for x in tensors_in(dict(state))}
    return sum(unique.values())


def temporary_bytes(step: Callable[[], object]) -> int:
    """Peak memory that a step allocates, in addition to what was allocated before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results if profile.profiler else None
    events = [] if results is None else [e for e in results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measure(shape: str, rounds: int, names: list[str]) -> list[Row]:
    """Time the named optimizers on one list of parameters, in turns."""
    generator = torch.Generator().manual_seed(0)
    sizes = SHAPES[shape]()
    params = [torch.nn.Parameter(0.02 * torch.randn(size, generator=generator)) for size in sizes]
    # Alternate three sets: with a constant gradient the variance would be zero.
    gradients = [[0.01 * torch.randn(p.shape, generator=generator) for p in params] for _ in range(3)]
    count = sum(p.numel() for p in params)

    def give(turn: int) -> None:
        for p, g in zip(params, gradients[turn % 3], strict=True):
            p.grad = g

    optimizers, first = {}, {}
    for name in names:
        give(0)
        optimizers[name] = ROWS[name](params)
        start = time.perf_counter()
        optimizers[name].step()
        first[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in track(range(rounds), description=f"{shape} ({count / 1e6:.1f} M)"):
        for name, optimizer in optimizers.items():
            give(turn)
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
    reference = statistics.median(times[REFERENCE])
    rows = []
    for name, optimizer in optimizers.items():
        low, median, high = statistics.quantiles(times[name], n=4)
        rows.append(
            Row(
                shape=shape,
                name=name,
                median_ms=1e3 * median,
                low_ms=1e3 * low,
                high_ms=1e3 * high,
                ratio=median / reference,
                first_step_s=first[name],
                state_bytes_per_parameter=state_bytes(optimizer) / count,
                temporary_bytes_per_parameter=temporary_bytes(optimizer.step) / count,
            )
        )
    return rows


def show(rows: list[Row], console: Console) -> None:
    """Print one table per list of parameters."""
    for shape in dict.fromkeys(row.shape for row in rows):
        table = Table(title=f"One step, {shape}")
        for heading in (
            "optimizer",
            "median ms",
            "quartiles ms",
            "ratio",
            "first step s",
            "state B/param",
            "temporary B/param",
        ):
            table.add_column(heading, justify="right")
        for row in (row for row in rows if row.shape == shape):
            table.add_row(
                row.name,
                f"{row.median_ms:.3f}",
                f"{row.low_ms:.3f}-{row.high_ms:.3f}",
                f"{row.ratio:.2f}",
                f"{row.first_step_s:.1f}",
                f"{row.state_bytes_per_parameter:.1f}",
                f"{row.temporary_bytes_per_parameter:.1f}",
            )
        console.print(table)


def draw(rows: list[Row], shape: str, path: Path) -> None:
    """Draw the ratios of one list as a bar chart."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    chosen = sorted((row for row in rows if row.shape == shape), key=lambda row: -row.ratio)
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(chosen) + 1.1), layout="constrained")

    def colour(name: str) -> str:
        return "#1f6fb4" if name.startswith("CProp") else "#b9bec5" if "bare" in name else "#7f858d"

    axes.barh([row.name for row in chosen], [row.ratio for row in chosen], color=[colour(row.name) for row in chosen])
    for i, row in enumerate(chosen):
        axes.text(row.ratio * 1.04, i, f"{row.ratio:.2f}", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(0.3, max(row.ratio for row in chosen) * 1.6)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("time per step relative to torch's fused Adam (log scale; lower is better)")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="parameter lists to run")
    parser.add_argument("--rounds", type=int, default=31, help="turns that every optimizer gets")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only rows whose name contains one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the 25M list as a picture")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    console = Console()
    rows: list[Row] = []
    for shape in arguments.shapes:
        count = sum(map(math.prod, SHAPES[shape]()))
        names = [name for name in ROWS if count < LARGE or name in FEW]
        if len(set(SHAPES[shape]())) > 10:
            # It compiles a kernel for every shape, which takes 15 seconds each.
            names = [name for name in names if "torchao" not in name]
        if arguments.only:
            names = [name for name in names if name == REFERENCE or any(text in name for text in arguments.only)]
        rows += measure(shape, arguments.rounds if count < LARGE else max(arguments.rounds // 3, 5), names)
        show([row for row in rows if row.shape == shape], console)
        save(arguments, rows)


def save(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Write the measurements so far."""
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
        report = {
            "torch": torch.__version__,
            "cprop": cprop.__version__,
            "machine": machine,
            "rounds": arguments.rounds,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    shape = "25M" if "25M" in arguments.shapes else arguments.shapes[0]
    if arguments.chart and any(row.shape == shape for row in rows):
        draw(rows, shape, arguments.chart)


if __name__ == "__main__":
    main()
