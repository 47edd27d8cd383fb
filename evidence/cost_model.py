"""Cost model of a step per rank, from one GPU to ten thousand; ``python -m evidence.report`` writes the tables.

A step is element-wise: each rank only reads and writes its shard of a few vectors. So its time is their
size in bytes divided by the memory bandwidth. The bytes follow from the rules; the model is compared
to the measurements in ``benchmarks/results/step.json``. The tables for GPUs are predictions only:
nothing here was run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What an optimizer reads, writes and stores, in multiples of the parameter's size."""

    name: str
    reads: int
    writes: int
    state: int
    row: str
    """Its name in the measured table."""

    @property
    def moved(self) -> int:
        """Numbers moved per parameter and step."""
        return self.reads + self.writes


# Read p, g and all state; write p and all state. The wrapper first passes over the gradient and its
# statistics (copies p, writes g back), then Adam runs, then it passes over p, the copy and the statistics.
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
    """Memory bandwidth of one rank in bytes per second, from the data sheet of an H100 SXM."""

    def seconds(self, cost: Cost, efficiency: float = 0.8) -> float:
        """Time per step on one rank, if it reaches that fraction of the bandwidth."""
        return 1e9 * self.gigabytes_moved(cost) / (self.bandwidth * efficiency)

    def gigabytes_moved(self, cost: Cost) -> float:
        """Bytes that one rank reads and writes per step."""
        return 4 * cost.moved * self.parameters / self.ranks / 1e9

    def gibibytes(self, cost: Cost) -> float:
        """Bytes of state per rank."""
        return 4 * cost.state * self.parameters / self.ranks / 2**30


SETTINGS = (Setting(1e9, 1), Setting(1e9, 8), Setting(70e9, 512), Setting(1e12, 10_000))


def check(times: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Each optimizer's time relative to torch's fused Adam: predicted from the bytes, and measured."""
    return [(cost.name, cost.moved / ADAM.moved, times[cost.row] / times[ADAM.row]) for cost in COSTS]
