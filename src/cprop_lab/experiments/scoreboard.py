"""The scoreboard's protocol: which optimizers take part, with which settings, and how their steps are timed.

Its rules were written down before its runs (docs/results/scoreboard.md). In short: the learning rates of all optimizers
without CProp are selected by the same procedure, CProp uses that of the optimizer inside, and the score is when an
optimizer reaches tuned Adam's final training loss, seed by seed (:mod:`cprop_lab.analysis.scoreboard`).
"""

from __future__ import annotations

from typing import Final

from cprop_lab.run.names import parse
from cprop_lab.run.specification import Specification

__all__ = ["OPTIMIZERS", "TIMINGS", "settings", "timing"]

OPTIMIZERS: Final = (
    *("sgd", "cprop-sgd", "adam", "cprop-adam", "adam+ema", "cprop-adam+ema"),
    *("adamw", "cprop-adamw", "adamw+cosine", "cprop-adamw+cosine"),
    *("schedule-free-adamw", "schedule-free-cprop", "cautious-adamw", "prodigy", "lion", "adabelief"),
)


TIMINGS: Final = 3
"""Short runs of every row that measure the seconds per step, in turn; the fastest counts."""


WEIGHT_DECAY: Final = 0.01
"""Of AdamW, torch's default: without any it would be Adam. The others have none, since training losses are compared."""


def timing(specification: Specification, iterations: int) -> Specification:
    """A short run that measures the seconds per step.

    Long runs share their machine with changing other work; short ones can be made in turn on an idle machine.
    """
    every = max(1, iterations // 10)
    # Evaluations only divide the run into stretches; for a text, an example is a window, and a hundred take minutes.
    few = max(1, min(100, specification.examples // 20))
    return specification.replace(iterations=max(10, iterations), evaluate_every=every, examples=few)


def settings(optimizer: str) -> dict[str, float]:
    """What a row sets besides the defaults."""
    return {"weight_decay": WEIGHT_DECAY} if parse(optimizer).base == "adamw" else {}
