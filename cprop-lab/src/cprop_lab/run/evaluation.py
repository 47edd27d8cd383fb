"""What an evaluation of a run measures: one row of its curves."""

from __future__ import annotations

from typing import Any, Final, Literal

__all__ = ["BINS", "METRICS", "Evaluation", "Status"]

Evaluation = dict[str, Any]
"""The step, the seconds, the losses, the metric if there is one, the learning rate, and CProp's scales."""
Status = Literal["finished", "diverged"]
"""How a run ended."""

METRICS: Final = ("accuracy", "perplexity")
"""Of which a workload has at most one."""
BINS: Final = 20
"""Of the scale's histogram, equal parts of [0, 1]."""
