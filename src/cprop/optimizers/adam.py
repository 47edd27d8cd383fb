"""Adam, AMSGrad and AdamW, scaled by conformity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cprop.arithmetic import Number, add, addcdiv, divide, one_minus_power
from cprop.measures import Measure
from cprop.optimizers.native import NativeOptimizer
from cprop.optimizers.settings import arguments, check_betas, check_non_negative, documented
from cprop.rules import GRAD, PARAM
from cprop.statistics import (
    MEAN_SQUARE,
    StatisticsScalars,
    running_mean,
    running_mean_square,
    scale_from,
    update_statistics,
)

__all__ = ["CPropAdam", "CPropAdamW"]


class AdamScalars(NamedTuple):
    weight1: Number
    """Weight of a new gradient in the running mean, 1 - betas[0]."""
    beta2: Number
    weight2: Number
    """Weight of a new gradient in the running mean square, 1 - betas[1]."""
    eps: Number
    step_size: Number
    """Learning rate divided by the first bias correction."""
    bias_correction2_sqrt: Number
    inverse_bias_correction2_sqrt: Number
    weight_decay: Number
    shrink: Number
    """Factor of decoupled decay on the parameter, 1 - lr * weight_decay."""
    statistics: StatisticsScalars


class AdamFlags(NamedTuple):
    amsgrad: bool
    decay: bool
    decoupled: bool
    maximize: bool
    measure: str | Measure


class AdamStep(NamedTuple):
    """The part of a step that Adam and its variants share."""

    p: Tensor
    """The parameter, after decoupled decay, if any."""
    exp_avg: Tensor
    """The running mean of the gradient."""
    mean_square: Tensor
    """The running mean square, or its running maximum."""
    scale: Tensor
    updated: dict[str, Tensor]


def adam_step(x: Mapping[str, Tensor], h: AdamScalars, flags: AdamFlags) -> AdamStep:
    """Update Adam's averages and the statistics."""
    p, g = x[PARAM], x[GRAD]
    d = -g if flags.maximize else g
    if flags.decay and flags.decoupled:
        p = p * h.shrink
    elif flags.decay:
        d = add(d, p, h.weight_decay)
    exp_avg = running_mean(x["exp_avg"], d, h.weight1)
    exp_avg_sq = running_mean_square(x["exp_avg_sq"], d, h.beta2, h.weight2)

    shared = None if MEAN_SQUARE in x else exp_avg_sq
    updated = update_statistics(g, x, h.statistics, shared)
    scale = scale_from(updated, h.statistics, flags.measure, shared)

    updated.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)  # torch.compile of torch 2.6 has no |= of dictionaries
    if flags.amsgrad:
        exp_avg_sq = torch.maximum(x["max_exp_avg_sq"], exp_avg_sq)
        updated["max_exp_avg_sq"] = exp_avg_sq
    return AdamStep(p, exp_avg, exp_avg_sq, scale, updated)


def adam(x: Mapping[str, Tensor], h: AdamScalars, flags: AdamFlags) -> dict[str, Tensor]:
    """One step of Adam, with the update multiplied by the conformity scale."""
    p, exp_avg, mean_square, scale, updated = adam_step(x, h, flags)
    root = divide(torch.sqrt(mean_square), h.bias_correction2_sqrt, h.inverse_bias_correction2_sqrt)
    updated[PARAM] = addcdiv(p, scale * exp_avg, root + h.eps, -h.step_size)
    return updated


class AdamFamily(NativeOptimizer):
    """The state, scalars and flags of Adam and its variants."""

    shared_square = "exp_avg_sq"
    switched_state = ("max_exp_avg_sq",)
    maximum_flag: ClassVar[str] = "amsgrad"

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_betas(group["betas"])
        check_non_negative(eps=group["eps"], weight_decay=group["weight_decay"])

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group[self.maximum_flag] else ())

    def _shares_square(self, group: Mapping[str, Any]) -> bool:
        l2_term = group["weight_decay"] != 0 and not group["decoupled_weight_decay"]
        return bool(group["betas"][1] == group["cprop_beta"] and not l2_term)

    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> Any:
        return self._adam_scalars(group, t, statistics)

    def _adam_scalars(self, group: Mapping[str, Any], t: Number, statistics: StatisticsScalars) -> AdamScalars:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        bias_correction2_sqrt = one_minus_power(beta2, t) ** 0.5
        return AdamScalars(
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            eps=group["eps"],
            step_size=lr / one_minus_power(beta1, t),
            bias_correction2_sqrt=bias_correction2_sqrt,
            inverse_bias_correction2_sqrt=1 / bias_correction2_sqrt,
            weight_decay=group["weight_decay"],
            shrink=1 - lr * group["weight_decay"],
            statistics=statistics,
        )

    def _flags(self, group: Mapping[str, Any]) -> AdamFlags:
        return AdamFlags(
            amsgrad=group[self.maximum_flag],
            decay=group["weight_decay"] != 0,
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            measure=group["cprop_measure"],
        )


@documented
class CPropAdam(AdamFamily):
    r"""Adam, scaled down where past gradients disagree.

    .. math::
        \theta_t = \theta_{t-1} - \gamma\, \hat s_t\, \frac{\hat m^{(1)}_t}{\sqrt{\hat v_t} + \epsilon}

    with Adam's averages :math:`\hat m^{(1)}_t` and :math:`\hat v_t`, and the scale
    :math:`\hat s_t` of :func:`cprop.conformity_scale`. The statistics use the raw gradient without
    the L2 term. Decoupled weight decay is not scaled, because it does not depend on the gradient.
    (The wrapper :class:`cprop.CProp` cannot separate the two and scales both.)

    The statistics share Adam's mean square if both are equal, that is if ``betas[1] == cprop_beta``
    and there is no L2 term. The state is then three tensors per parameter.

    For half-precision parameters, the state and the arithmetic are in float32.

    Args:
        {params, lr, betas}
        eps: Adam's :math:`\epsilon`.
        weight_decay: L2 penalty, or decoupled decay with ``decoupled_weight_decay``.
        amsgrad: whether to divide by the running maximum of the mean square.
        decoupled_weight_decay: decay the parameter directly, as AdamW does.
        {maximize, foreach, fused, capturable}
        {cprop_beta, cprop_c, cprop_eps, cprop_measure, cprop_state_dtype, cprop_stochastic_rounding}

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CPropAdam(model.parameters(), lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['cprop_m', 'cprop_step', 'exp_avg', 'exp_avg_sq', 'step']

    References:
        Preechakul and Kijsirikul, *CProp*, 2019, Algorithm 1. Kingma and Ba, *Adam*, 2014. Reddi et
        al., *On the Convergence of Adam and Beyond*, 2018.
    """

    rule = staticmethod(adam)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        cprop_beta: float = 0.999,
        cprop_c: float = 1.0,
        cprop_eps: float = 0.0,
        cprop_measure: str | Measure = "normal",
        cprop_state_dtype: str = "float32",
        cprop_stochastic_rounding: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__(params, arguments(locals()))


@documented
class CPropAdamW(CPropAdam):
    r"""AdamW, scaled down where past gradients disagree. Its weight decay is not scaled.

    .. math::
        \theta_t = (1 - \gamma \lambda)\, \theta_{t-1}
                   - \gamma\, \hat s_t\, \frac{\hat m^{(1)}_t}{\sqrt{\hat v_t} + \epsilon}

    Args:
        {params, lr, betas}
        eps: Adam's :math:`\epsilon`.
        weight_decay: decoupled decay :math:`\lambda`.
        amsgrad: whether to divide by the running maximum of the mean square.
        {maximize, foreach, fused, capturable}
        {cprop_beta, cprop_c, cprop_eps, cprop_measure, cprop_state_dtype, cprop_stochastic_rounding}

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CPropAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()

    References:
        Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        super().__init__(params, decoupled_weight_decay=True, **arguments(locals()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also called on loading: a checkpoint of Adam says L2, but AdamW always decouples, as in torch.
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
