"""Optimizers that average inside, their base sequence scaled by CProp: GPA and Schedule-Free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cprop import conformity_scale
from cprop_lab.run.averaging import GPA, PrimalAveraging
from cprop_lab.run.measures import OWN
from cprop_lab.run.names import PAPERS_EPS

__all__ = ["GPACProp", "ScheduleFreeCProp"]


class GPACProp(GPA):
    r"""GPA whose update is scaled by CProp.

    .. math::
        d_t = \hat s_t \, u_t + \lambda z_t

    Args:
        params: what it moves.
        lr: the learning rate.
        c: CProp's overconfidence.
        beta: of CProp's statistics.
        measure: of conformity, by name.
        settings: of :class:`cprop_lab.run.averaging.GPA`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        c: float = 1.0,
        beta: float = 0.999,
        measure: str = "normal",
        **settings: Any,
    ) -> None:
        super().__init__(params, lr, **settings)
        for group in self.param_groups:
            group.update(c=c, beta=beta, measure=measure)

    def update(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """That of the optimizer inside, times the scale."""
        update = super().update(g, state, group)
        update *= self._scale(g, state, group)
        return update

    def _scale(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if "mean" not in state:
            state |= {"mean": torch.zeros_like(g), "square": torch.zeros_like(g)}
        beta, b = group["beta"], 1 - group["beta"] ** state["t"]
        state["mean"].lerp_(g, 1 - beta)
        state["square"].lerp_(g * g, 1 - beta)
        measure = OWN.get(group["measure"], group["measure"])
        n = b / (1 - beta)
        moments = state["mean"] / b, state["square"] / b, n
        return conformity_scale(*moments, c=group["c"], eps=PAPERS_EPS, measure=measure)


class ScheduleFreeCProp(PrimalAveraging):
    r"""Schedule-Free AdamW (Defazio et al., 2024) with CProp's scale on its base sequence.

    .. math::
        d_t = \hat s_t \, g_t / (\sqrt{\hat v_t} + \epsilon), \qquad \mu = \beta_1, \qquad w_t = 1/t

    Averaging and CProp shrink the same noise twice over, so CProp is overconfident here by default.

    Args:
        params: what it moves.
        lr: the learning rate, constant.
        betas: of the interpolation, and of the mean square, which CProp shares.
        eps: added to the root.
        c: CProp's overconfidence; infinity gives Schedule-Free AdamW.
        cprop_eps: added to the standard error.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = ScheduleFreeCProp([w], lr=0.1)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> w.detach()
        tensor([0.9000, 0.9000, 0.9000])

    References:
        Defazio et al., *The Road Less Scheduled*, 2024.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        c: float = 4.0,
        cprop_eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, c=c, cprop_eps=cprop_eps)

    def interpolation(self, group: dict[str, Any]) -> float:
        """Beta 1, as in Schedule-Free."""
        return float(group["betas"][0])

    def newest(self, group: dict[str, Any], t: int) -> float:
        """One of t: a uniform average."""
        return 1 / t

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Adam without momentum, scaled by CProp."""
        beta2 = group["betas"][1]
        if "m" not in state:
            state |= {"m": torch.zeros_like(g), "v": torch.zeros_like(g)}
        m, v = state["m"], state["v"]
        m.lerp_(g, 1 - beta2)
        v.lerp_(g * g, 1 - beta2)
        correction = 1 - beta2 ** state["t"]
        v_hat = v / correction
        n = correction / (1 - beta2)
        scale = conformity_scale(m / correction, v_hat, n, c=group["c"], eps=group["cprop_eps"])
        move: Tensor = scale * g / (v_hat.sqrt() + group["eps"])
        return move
