"""What a step costs a rank, from one GPU to ten thousand: ``python -m benchmarks.cost_model``.

A step is element-wise: it reads and writes each rank's share of a few vectors, and nothing else. So
its time is their bytes over the memory's bandwidth. The bytes are counted from the rules; the model is
held against ``benchmarks/results/step.json``, which was measured. The tables for GPUs are the model's
alone: nothing here was run on one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Cost:
    """What one optimizer reads, writes and keeps, in numbers of the parameter's size."""

    name: str
    reads: int
    writes: int
    state: int
    temporary: int = 0
    row: str = ""
    """Its name in the measured table."""

    @property
    def moved(self) -> int:
        """Numbers moved a parameter and step."""
        return self.reads + self.writes


# Read p, g and all state; write p and all state. The wrapper goes over the gradient and its statistics
# first (p copied aside, g written back), lets Adam pass, and goes over p, the copy and the statistics.
COSTS = (
    Cost("torch Adam", reads=4, writes=3, state=2, row="torch Adam, fused"),
    Cost("CPropAdam", reads=5, writes=4, state=3, row="CPropAdam, fused"),
    Cost("CPropSGD", reads=4, writes=3, state=2, row="CPropSGD, fused"),
    Cost("CProp(Adam)", reads=12, writes=8, state=4, temporary=1, row="CProp(Adam), fused"),
)
ADAM = COSTS[0]


@dataclass(frozen=True)
class Setting:
    """A model in float32, sharded over a number of ranks."""

    parameters: float
    ranks: int
    bandwidth: float = 3.35e12
    """Bytes a second of one rank's memory: the data sheet's for an H100 SXM."""

    def seconds(self, cost: Cost, efficiency: float = 0.8) -> float:
        """Time of a step on one rank, if it reaches that share of the bandwidth."""
        return 4 * cost.moved * self.parameters / self.ranks / (self.bandwidth * efficiency)

    def gibibytes(self, cost: Cost, bytes_per_number: float = 4) -> float:
        """State that one rank keeps."""
        return bytes_per_number * cost.state * self.parameters / self.ranks / 2**30


SETTINGS = (Setting(1e9, 1), Setting(1e9, 8), Setting(70e9, 512), Setting(1e12, 10_000))


def measured(shape: str) -> dict[str, float]:
    """Milliseconds of a step, by row, from the committed measurement."""
    rows = json.loads((RESULTS / "step.json").read_text())["rows"]
    return {row["name"]: row["median_ms"] for row in rows if row["shape"] == shape}


def check(shape: str) -> list[tuple[str, float, float]]:
    """Each optimizer's time against torch's fused Adam: as the bytes predict, and as measured."""
    times = measured(shape)
    return [(cost.name, cost.moved / ADAM.moved, times[cost.row] / times[ADAM.row]) for cost in COSTS]


def check_table() -> str:
    """The model against the measurement, as Markdown."""
    lines = [
        "| against torch's fused Adam | by bytes | measured, 25 M | measured, 124 M |",
        "| --- | --- | --- | --- |",
    ]
    for (name, predicted, at_25), (_, _, at_124) in zip(check("25M"), check("gpt2-small"), strict=True):
        lines.append(f"| {name} | {predicted:.2f} | {at_25:.2f} | {at_124:.2f} |")
    return "\n".join(lines)


def scale_table() -> str:
    """The model's prediction, as Markdown."""
    lines = ["| parameters | ranks | optimizer | state a rank, GiB | bytes moved a rank, GB | time of a step, ms |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for setting in SETTINGS:
        for cost in COSTS:
            moved = 4 * cost.moved * setting.parameters / setting.ranks / 1e9
            size = f"{setting.parameters / 1e9:,.0f} B" if setting.parameters < 1e12 else "1 T"
            lines.append(
                f"| {size} | {setting.ranks:,} | {cost.name} | {setting.gibibytes(cost):.2f} | {moved:.2f} | "
                f"{1e3 * setting.seconds(cost):.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(check_table(), scale_table(), sep="\n\n")
