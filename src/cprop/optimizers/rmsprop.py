"""RMSprop, scaled by conformity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cprop.arithmetic import Number, add, addcdiv, addcmul
from cprop.measures import Measure
from cprop.optimizers.native import NativeOptimizer
from cprop.optimizers.settings import arguments, check_non_negative, documented, require
from cprop.rules import GRAD, PARAM
from cprop.statistics import (
    MEAN_SQUARE,
    StatisticsScalars,
    running_mean,
    running_mean_square,
    scale_from,
    update_statistics,
)

__all__ = ["CPropRMSprop"]


class RMSpropScalars(NamedTuple):
    lr: Number
    alpha: Number
    weight: Number
    """Weight of a new gradient in the running averages, 1 - alpha."""
    eps: Number
    momentum: Number
    weight_decay: Number
    statistics: StatisticsScalars


class RMSpropFlags(NamedTuple):
    momentum: bool
    centered: bool
    decay: bool
    maximize: bool
    measure: str | Measure


def rmsprop(x: Mapping[str, Tensor], h: RMSpropScalars, flags: RMSpropFlags) -> dict[str, Tensor]:
    """One step of RMSprop, with the update multiplied by the conformity scale."""
    p, g = x[PARAM], x[GRAD]
    d = -g if flags.maximize else g
    if flags.decay:
        d = add(d, p, h.weight_decay)
    square_avg = running_mean_square(x["square_avg"], d, h.alpha, h.weight)

    shared = None if MEAN_SQUARE in x else square_avg
    updated = update_statistics(g, x, h.statistics, shared)
    scale = scale_from(updated, h.statistics, flags.measure, shared)

    updated["square_avg"] = square_avg
    if flags.centered:
        grad_avg = running_mean(x["grad_avg"], d, h.weight)
        updated["grad_avg"] = grad_avg
        square_avg = addcmul(square_avg, grad_avg, grad_avg, -1)
    rms = torch.sqrt(square_avg) + h.eps
    if flags.momentum:
        buffer = addcdiv(x["momentum_buffer"] * h.momentum, d, rms, 1)
        updated["momentum_buffer"] = buffer
        updated[PARAM] = add(p, scale * buffer, -h.lr)
    else:
        updated[PARAM] = addcdiv(p, scale * d, rms, -h.lr)
    return updated


@documented
class CPropRMSprop(NativeOptimizer):
    r"""RMSprop, scaled down where past gradients disagree.

    .. math::
        \theta_t = \theta_{t-1} - \gamma\, \hat s_t\, \frac{g_t}{\sqrt{v_t} + \epsilon}

    with the scale :math:`\hat s_t` of :func:`cprop.conformity_scale`. The statistics use the raw
    gradient without the L2 term. They share RMSprop's mean square if ``alpha == cprop_beta`` and
    there is no L2 term.

    Args:
        {params, lr}
        alpha: coefficient of the running mean square.
        eps: RMSprop's :math:`\epsilon`.
        weight_decay: L2 penalty.
        momentum: momentum of the scaled gradient.
        centered: divide by the standard deviation instead of the root mean square.
        {maximize, foreach, fused, capturable}
        {cprop_beta, cprop_c, cprop_eps, cprop_measure, cprop_state_dtype, cprop_stochastic_rounding}

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CPropRMSprop(model.parameters(), lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()

    References:
        Tieleman and Hinton, *Lecture 6.5: RMSprop*, 2012.
    """

    rule = staticmethod(rmsprop)
    shared_square = "square_avg"
    switched_state = ("momentum_buffer", "grad_avg")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        cprop_beta: float = 0.999,
        cprop_c: float = 1.0,
        cprop_eps: float = 0.0,
        cprop_measure: str | Measure = "normal",
        cprop_state_dtype: str = "float32",
        cprop_stochastic_rounding: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_non_negative(eps=group["eps"], weight_decay=group["weight_decay"], momentum=group["momentum"])
        require(0.0 <= group["alpha"] < 1.0, f"invalid alpha {group['alpha']}: it must be in [0, 1)")

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def _shares_square(self, group: Mapping[str, Any]) -> bool:
        return bool(group["alpha"] == group["cprop_beta"] and group["weight_decay"] == 0)

    def _scalars(
        self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars
    ) -> RMSpropScalars:
        return RMSpropScalars(
            lr=group["lr"],
            alpha=group["alpha"],
            weight=1 - group["alpha"],
            eps=group["eps"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            statistics=statistics,
        )

    def _flags(self, group: Mapping[str, Any]) -> RMSpropFlags:
        return RMSpropFlags(
            momentum=group["momentum"] != 0,
            centered=group["centered"],
            decay=group["weight_decay"] != 0,
            maximize=group["maximize"],
            measure=group["cprop_measure"],
        )
