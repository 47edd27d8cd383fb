"""A run's optimizer and scheduler, built from its specification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler

import cprop
from cprop.statistics import PREFIX
from cprop_lab.run import measures
from cprop_lab.run.names import CPROP_DEFAULTS, START
from cprop_lab.run.specification import Specification

__all__ = ["EMA_DECAY", "LateStart", "build"]

EMA_DECAY: Final = 0.999
"""Of the averaged weights that ``+ema`` evaluates."""


class LateStart(LRScheduler):
    """CProp only observes the first steps and scales after them: until then its ``c`` is infinite, a scale of one.

    Args:
        optimizer: with CProp.
        steps: how many it only observes.
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.steps = steps
        self.cs = [group["cprop_c"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Set ``c``, and leave the learning rate as it is."""
        for group, c in zip(self.optimizer.param_groups, self.cs, strict=True):
            group["cprop_c"] = math.inf if self.last_epoch < self.steps else c
        return [group["lr"] for group in self.optimizer.param_groups]


def build(specification: Specification, params: Iterable[nn.Parameter]) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer of a run, and its scheduler if it has one; cosine decay's horizon is the run's length."""
    name = specification.optimizer_name
    settings = specification.resolved_settings()
    start = int(settings.pop(START, 0))
    of_cprop: dict[str, Any] = {key: settings.pop(key) for key in CPROP_DEFAULTS if key in settings}
    if name.cprop:
        of_cprop["cprop_measure"] = measures.OWN.get(of_cprop["cprop_measure"], of_cprop["cprop_measure"])
    recipe = name.recipe
    if not name.cprop:
        optimizer = recipe.plain(params, lr=specification.lr, **settings)
    elif recipe.native is not None:
        optimizer = recipe.native(params, lr=specification.lr, **settings, **of_cprop)
    else:
        inner = recipe.plain(params, lr=specification.lr, **settings)
        optimizer = cprop.CProp(inner, **{key.removeprefix(PREFIX): value for key, value in of_cprop.items()})
    schedulers: list[LRScheduler] = []
    if start:
        schedulers.append(LateStart(optimizer, start))
    if name.cosine:
        schedulers.append(CosineAnnealingLR(optimizer, specification.iterations))
    return optimizer, ChainedScheduler(schedulers) if len(schedulers) > 1 else next(iter(schedulers), None)
