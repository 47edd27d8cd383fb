"""SGD with momentum, scaled by conformity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Never

from torch import Tensor
from torch.optim.optimizer import ParamsT

from cprop.arithmetic import Number, add
from cprop.measures import Measure
from cprop.optimizers.native import NativeOptimizer
from cprop.optimizers.settings import arguments, check_non_negative, documented, require
from cprop.rules import GRAD, PARAM
from cprop.statistics import StatisticsScalars, scale_from, update_statistics

__all__ = ["CPropSGD"]


class SGDScalars(NamedTuple):
    lr: Number
    momentum: Number
    gain: Number
    """Weight of the gradient in the momentum: one at the first step, 1 - dampening afterwards."""
    weight_decay: Number
    statistics: StatisticsScalars


class SGDFlags(NamedTuple):
    momentum: bool
    nesterov: bool
    decay: bool
    maximize: bool
    measure: str | Measure


def sgd(x: Mapping[str, Tensor], h: SGDScalars, flags: SGDFlags) -> dict[str, Tensor]:
    """One step of SGD, with the update multiplied by the conformity scale."""
    p, g = x[PARAM], x[GRAD]
    updated = update_statistics(g, x, h.statistics)
    scale = scale_from(updated, h.statistics, flags.measure)

    d = -g if flags.maximize else g
    if flags.decay:
        d = add(d, p, h.weight_decay)
    if flags.momentum:
        buffer = add(x["momentum_buffer"] * h.momentum, d, h.gain)
        updated["momentum_buffer"] = buffer
        d = add(d, buffer, h.momentum) if flags.nesterov else buffer
    updated[PARAM] = add(p, scale * d, -h.lr)
    return updated


@documented
class CPropSGD(NativeOptimizer):
    r"""Stochastic gradient descent, scaled down where past gradients disagree.

    .. math::
        b_t &= \mu\, b_{t-1} + (1 - \tau)(g_t + \lambda \theta_{t-1}) \\
        \theta_t &= \theta_{t-1} - \gamma\, \hat s_t\, b_t

    with the scale :math:`\hat s_t` of :func:`cprop.conformity_scale`. The statistics use the raw
    gradient :math:`g_t` without the L2 term. The whole update is scaled, including the L2 term.

    Args:
        {params, lr}
        momentum: momentum :math:`\mu`.
        dampening: dampening :math:`\tau` of the momentum.
        weight_decay: L2 penalty :math:`\lambda`.
        nesterov: whether to use Nesterov momentum.
        {maximize, foreach, fused, capturable}
        {cprop_beta, cprop_c, cprop_eps, cprop_measure, cprop_state_dtype, cprop_stochastic_rounding}

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CPropSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()

    References:
        Preechakul and Kijsirikul, *CProp*, 2019, Algorithm 1.
    """

    rule = staticmethod(sgd)
    counts_steps = False
    switched_state = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
        momentum, dampening = group["momentum"], group["dampening"]
        check_non_negative(momentum=momentum, weight_decay=group["weight_decay"])
        require(
            not group["nesterov"] or (momentum > 0 and dampening == 0),
            f"nesterov needs momentum > 0 and dampening = 0, but got momentum {momentum}, dampening {dampening}",
        )

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> SGDScalars:
        return SGDScalars(
            lr=group["lr"],
            momentum=group["momentum"],
            gain=1.0 if fresh else 1 - group["dampening"],
            weight_decay=group["weight_decay"],
            statistics=statistics,
        )

    def _flags(self, group: Mapping[str, Any]) -> SGDFlags:
        return SGDFlags(
            momentum=group["momentum"] != 0,
            nesterov=group["nesterov"],
            decay=group["weight_decay"] != 0,
            maximize=group["maximize"],
            measure=group["cprop_measure"],
        )
