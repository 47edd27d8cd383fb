"""Where a run was made: versions, machine and time, for readers of its results."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import cprop
from cprop_lab.run.training import Training

__all__ = ["commit", "provenance"]


def provenance(training: Training) -> dict[str, Any]:
    """Versions, machine and time of a run, for readers of its results."""
    return {
        "cprop": cprop.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "cpu": cpu_model(),
        "load": round(os.getloadavg()[0], 2),  # at the end of the run
        "cpu_share": round(training.cpu_seconds / training.seconds, 3) if training.seconds else None,
        "seconds": round(training.seconds, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def cpu_model() -> str:
    """The processor's name; Linux alone has it in a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@cache
def commit() -> str:
    """The commit of the running code, marked if it has been changed; empty outside a checkout."""
    here = Path(__file__).parent
    try:
        call = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
