"""What a run may take, and whether machines can hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What a run may take, and how much is waited for and repeated; nothing of it changes what a run computes.

    Args:
        cpus: per run; as many runs as fit are executed in parallel.
        gpus: per run (may be fractional).
        retries: how often a run whose process or node is lost is started again; one that raised an exception is not.
        checkpoint_seconds: how much work a kill may cost a run; by default 30 seconds, or more if writing takes long.
        wait_for_workers: minutes for which a cluster may have no machine that can hold a run.

    Example:
        >>> limits = Limits(cpus=4, gpus=0.5)
        >>> limits.fitting([{"CPU": 16.0, "GPU": 1.0}, {"CPU": 16.0}])
        2
    """

    cpus: int = 1
    gpus: float = 0
    retries: int = 3
    checkpoint_seconds: float | None = None
    wait_for_workers: float = 15.0

    def fitting(self, machines: Iterable[Mapping[str, float]]) -> int:
        """How many runs such machines can execute at once; a run does not stretch over two of them."""
        asked = {kind: amount for kind, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}
        return sum(min(int(one.get(kind, 0.0) / amount) for kind, amount in asked.items()) for one in machines)

    def lacking(self, machines: Iterable[Mapping[str, float]]) -> str:
        """Why a run fits on no machine, in words.

        Example:
            >>> Limits(cpus=64).lacking([{"CPU": 2.0}])
            'a run asks for 64 CPU cores and 0 GPUs, and no machine has more than 2 and 0'
        """
        known = list(machines)
        cpus, gpus = (max((one.get(kind, 0.0) for one in known), default=0.0) for kind in ("CPU", "GPU"))
        asks = f"a run asks for {self.cpus} CPU cores and {self.gpus:g} GPUs"
        return f"{asks}, and no machine has more than {cpus:g} and {gpus:g}"
