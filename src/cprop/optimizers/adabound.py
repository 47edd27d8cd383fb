"""AdaBound, scaled by conformity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cprop.arithmetic import Number, clamp
from cprop.measures import Measure
from cprop.optimizers.adam import AdamFamily, AdamFlags, AdamScalars, adam_step
from cprop.optimizers.settings import arguments, check_non_negative, documented, require
from cprop.rules import PARAM
from cprop.statistics import StatisticsScalars

__all__ = ["CPropAdaBound"]


class AdaBoundScalars(NamedTuple):
    adam: AdamScalars
    step_size: Number
    lower: Number
    upper: Number


def adabound(x: Mapping[str, Tensor], h: AdaBoundScalars, flags: AdamFlags) -> dict[str, Tensor]:
    """One step of AdaBound, with the update multiplied by the conformity scale."""
    p, exp_avg, mean_square, scale, updated = adam_step(x, h.adam, flags)
    rate = clamp(h.step_size / (torch.sqrt(mean_square) + h.adam.eps), h.lower, h.upper)
    updated[PARAM] = p - scale * (rate * exp_avg)
    return updated


@documented
class CPropAdaBound(AdamFamily):
    r"""AdaBound, scaled down where past gradients disagree.

    It starts like Adam and ends like SGD: each element's learning rate is clipped between two bounds
    that converge to :math:`\gamma^*`.

    .. math::
        \eta_t &= \mathrm{clip}\left(\frac{\gamma \sqrt{1 - \beta_2^t}}{(1 - \beta_1^t)
                  (\sqrt{v_t} + \epsilon)},\;
                  \gamma^* \left(1 - \tfrac{1}{\kappa t + 1}\right),\;
                  \gamma^* \left(1 + \tfrac{1}{\kappa t}\right)\right) \\
        \theta_t &= \theta_{t-1} - \hat s_t\, \eta_t\, m_t

    with the scale :math:`\hat s_t` of :func:`cprop.conformity_scale`. Statistics, weight decay and the
    shared mean square are as in :class:`CPropAdam`.

    Args:
        {params}
        lr: Adam's learning rate :math:`\gamma`. A scheduler that changes it changes
            :math:`\gamma^*` in proportion.
        {betas}
        final_lr: final learning rate :math:`\gamma^*` of SGD.
        gamma: convergence speed :math:`\kappa` of the bounds; the AdaBound paper uses
            ``1 - betas[1]``.
        eps: Adam's :math:`\epsilon`.
        weight_decay: L2 penalty, or decoupled decay with ``decoupled_weight_decay``.
        amsbound: whether to divide by the running maximum of the mean square.
        decoupled_weight_decay: decay the parameter directly, as AdamW does.
        {maximize, foreach, fused, capturable}
        {cprop_beta, cprop_c, cprop_eps, cprop_measure, cprop_state_dtype, cprop_stochastic_rounding}

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CPropAdaBound(model.parameters(), lr=1e-3, final_lr=0.1)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()

    References:
        Luo et al., *Adaptive Gradient Methods with Dynamic Bound of Learning Rate*, 2019.
    """

    rule = staticmethod(adabound)
    maximum_flag = "amsbound"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        final_lr: float = 0.1,
        gamma: float = 1e-3,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsbound: bool = False,
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
        super().__init__(params, {**arguments(locals()), "base_lr": None})

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_non_negative(final_lr=group["final_lr"])
        require(0.0 < group["gamma"] < 1.0, f"invalid gamma {group['gamma']}: it must be in (0, 1)")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. Its ``final_lr`` is relative to its initial learning rate."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["base_lr"] is None:
            # A float, because a scheduler writes into a tensor, and reading one would synchronize.
            group["base_lr"] = float(group["lr"])

    def _scalars(
        self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars
    ) -> AdaBoundScalars:
        adam = self._adam_scalars(group, t, statistics)
        base_lr = group["base_lr"]
        final_lr = group["final_lr"] * (group["lr"] / base_lr if base_lr else 1.0)
        return AdaBoundScalars(
            adam=adam,
            step_size=adam.step_size * adam.bias_correction2_sqrt,
            lower=final_lr * (1 - 1 / (group["gamma"] * t + 1)),
            upper=final_lr * (1 + 1 / (group["gamma"] * t)),
        )
