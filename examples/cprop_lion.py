"""Lion scaled by conformity: all it takes to add an optimizer. Weight decay is omitted."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from cprop.arithmetic import Number, add
from cprop.measures import Measure
from cprop.optimizers.native import NativeOptimizer
from cprop.optimizers.settings import check_betas, complete
from cprop.rules import GRAD, PARAM
from cprop.statistics import StatisticsScalars, running_mean, scale_from, update_statistics


class LionScalars(NamedTuple):
    """The scalars of a step; the weights are one minus Lion's betas."""

    lr: Number
    weight1: Number
    weight2: Number
    statistics: StatisticsScalars


def lion(x: Mapping[str, torch.Tensor], h: LionScalars, measure: str | Measure) -> dict[str, torch.Tensor]:
    """One step of Lion, its update multiplied by the conformity scale."""
    p, g = x[PARAM], x[GRAD]
    updated = update_statistics(g, x, h.statistics)
    scale = scale_from(updated, h.statistics, measure)
    direction = torch.sign(running_mean(x["exp_avg"], g, h.weight1))
    updated["exp_avg"] = running_mean(x["exp_avg"], g, h.weight2)
    updated[PARAM] = add(p, scale * direction, -h.lr)
    return updated


class CPropLion(NativeOptimizer):
    """Lion (Chen et al., 2023) with steps that shrink where gradients disagree."""

    rule = staticmethod(lion)
    counts_steps = False  # Lion has no bias correction, so it needs no step count

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, **complete(options)})

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_betas(group["betas"])

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> LionScalars:
        return LionScalars(group["lr"], 1 - group["betas"][0], 1 - group["betas"][1], statistics)

    def _flags(self, group: Mapping[str, Any]) -> str | Measure:
        return group["cprop_measure"]
