"""Whether a machine can hold a run."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["room"]


def room(machine: Mapping[str, float], cpus: int, gpus: float) -> None:
    """Check that a machine can hold a run at all.

    Raises:
        ValueError: if not.

    Example:
        >>> room({"CPU": 2.0}, cpus=64, gpus=0)
        Traceback (most recent call last):
        ValueError: a run asks for 64 CPU cores and 0 GPUs, and no machine has more than 2 and 0: lower --cpus or --gpus
    """
    if machine.get("CPU", 0.0) < cpus or machine.get("GPU", 0.0) < gpus:
        raise ValueError(
            f"a run asks for {cpus} CPU cores and {gpus:g} GPUs, and no machine has more than "
            f"{machine.get('CPU', 0.0):g} and {machine.get('GPU', 0.0):g}: lower --cpus or --gpus"
        )
