"""What a step costs a rank, from one GPU to ten thousand; ``python -m benchmarks.report`` writes the tables.

A step is element-wise: it reads and writes each rank's share of a few vectors, and nothing else. So
its time is their bytes over the memory's bandwidth. The bytes are counted from the rules; the model is
held against ``benchmarks/results/step.json``, which was measured. The tables for GPUs are the model's
alone: nothing here was run on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one optimizer reads, writes and keeps, in numbers of the parameter's size."""

    name: str
    reads: int
    writes: int
    state: int
    row: str
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
    Cost("CProp(Adam)", reads=12, writes=8, state=4, row="CProp(Adam), fused"),
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
        return 1e9 * self.gigabytes_moved(cost) / (self.bandwidth * efficiency)

    def gigabytes_moved(self, cost: Cost) -> float:
        """What one rank reads and writes in a step."""
        return 4 * cost.moved * self.parameters / self.ranks / 1e9

    def gibibytes(self, cost: Cost) -> float:
        """State that one rank keeps."""
        return 4 * cost.state * self.parameters / self.ranks / 2**30


SETTINGS = (Setting(1e9, 1), Setting(1e9, 8), Setting(70e9, 512), Setting(1e12, 10_000))


def check(times: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Each optimizer's time against torch's fused Adam: as the bytes predict, and as measured, by row."""
    return [(cost.name, cost.moved / ADAM.moved, times[cost.row] / times[ADAM.row]) for cost in COSTS]
