"""A run's optimizer, scheduler and averaged weights, built from its specification."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import cprop
from cprop_lab.run import measures, peers
from cprop_lab.run.names import CPROP_DEFAULTS, FUSED_WRAPPER, START
from cprop_lab.run.specification import Specification

__all__ = ["LateStart", "average", "build", "factor"]

EMA_DECAY: Final = 0.999
"""Of the averaged weights of ``+ema``."""

POWER: Final = 8
"""Of ``+average``: weights are averaged in proportion to t^8, which is about the last ninth of the run so far."""

STABLE: Final = 0.8
"""The part of the run after which ``+wsd`` decays."""

HORIZON: Final = 1_000
"""Steps after which ``+rsqrt`` and ``+inverse`` decay: as many as CProp's statistics look back, so none is tuned."""


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


def factor(step: int, iterations: int, warmup: int = 0, schedule: str = "") -> float:
    """What the learning rate is multiplied by at a step, counted from zero: a linear warm-up, then the schedule.

    Example:
        >>> [factor(step, 100, warmup=4) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
        >>> [round(factor(step, 100, schedule="wsd"), 2) for step in (0, 80, 90, 100)]
        [1.0, 1.0, 0.5, 0.0]
        >>> [round(factor(step, 100, schedule="cosine"), 2) for step in (0, 50, 100)]
        [1.0, 0.5, 0.0]
        >>> [factor(step, 100, schedule="rsqrt") for step in (0, 3_000, 8_000)]  # however long the run will be
        [1.0, 0.5, 0.3333333333333333]
        >>> [factor(step, 100, schedule="inverse") for step in (0, 1_000, 3_000)]
        [1.0, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "cosine":
        return (1 + math.cos(math.pi * (step - warmup) / max(1, iterations - warmup))) / 2
    if schedule == "wsd":
        return min(1.0, (iterations - step) / (iterations * (1 - STABLE)))
    if schedule == "rsqrt":
        return 1 / math.sqrt(1 + (step - warmup) / HORIZON)
    if schedule == "inverse":
        return 1 / (1 + (step - warmup) / HORIZON)
    return 1.0


def build(specification: Specification, model: nn.Module, warmup: int = 0) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer of a run, and its scheduler if it has one.

    Args:
        specification: of the run.
        model: its network.
        warmup: the steps over which the learning rate rises, for every optimizer alike.
    """
    name = specification.optimizer_name
    recipe = name.recipe
    settings = specification.resolved_settings()
    start = int(settings.pop(START, 0))
    of_cprop: dict[str, Any] = {key: settings.pop(key) for key in (*CPROP_DEFAULTS, FUSED_WRAPPER) if key in settings}
    if name.cprop:
        of_cprop["cprop_measure"] = measures.OWN.get(of_cprop["cprop_measure"], of_cprop["cprop_measure"])
    if recipe.horizon:
        settings[recipe.horizon] = settings[recipe.horizon] or specification.iterations
    if recipe.warmup:
        settings[recipe.warmup], warmup = settings[recipe.warmup] or warmup, 0
    params = peers.groups(model) if recipe.matrices else model.parameters()
    if not name.cprop:
        optimizer = recipe.plain(params, lr=specification.lr, **settings)
    elif recipe.native is not None:
        optimizer = recipe.native(params, lr=specification.lr, **settings, **of_cprop)
    else:
        inner = recipe.plain(params, lr=specification.lr, **settings)
        optimizer = cprop.CProp(inner, **{key.removeprefix(cprop.PREFIX): value for key, value in of_cprop.items()})
    schedulers: list[LRScheduler] = []
    if start:
        schedulers.append(LateStart(optimizer, start))
    if name.schedule or warmup:
        schedule = partial(factor, iterations=specification.iterations, warmup=warmup, schedule=name.schedule)
        schedulers.append(LambdaLR(optimizer, schedule))
    return optimizer, ChainedScheduler(schedulers) if len(schedulers) > 1 else next(iter(schedulers), None)


def average(specification: Specification, model: nn.Module) -> AveragedModel | None:
    r"""The averaged weights that a run is evaluated with, if it is.

    Those of ``+average`` need not know how long the run will be, and their window grows with it:

    .. math::
        \bar\theta_t = \bar\theta_{t-1} + \frac{p + 1}{t + p} (\theta_t - \bar\theta_{t-1})

    References:
        Shamir and Zhang, *Stochastic Gradient Descent for Non-smooth Optimization*, 2013, section 4.
    """
    match specification.optimizer_name.average:
        case "ema":
            return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        case "average":
            return AveragedModel(model, multi_avg_fn=_grow)
        case _:
            return None


@torch.no_grad()
def _grow(averaged: Any, current: Any, count: Tensor | int) -> None:
    # AveragedModel copies the first weights itself: this is called from the second on, with those averaged so far.
    torch._foreach_lerp_(averaged, current, (POWER + 1) / (float(count) + 1 + POWER))
