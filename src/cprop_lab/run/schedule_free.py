"""A research row: Schedule-Free AdamW whose z-step is scaled by CProp. Not part of the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop import conformity_scale

__all__ = ["ScheduleFreeCProp"]


class ScheduleFreeCProp(Optimizer):
    r"""Schedule-Free AdamW (Defazio et al., 2024) with CProp's scale on its base sequence.

    .. math::
        y_t &= (1 - \beta_1) z_t + \beta_1 x_t \\
        z_{t+1} &= z_t - \gamma \, \hat s_t \, g_t / (\sqrt{\hat v_t} + \epsilon) \\
        x_{t+1} &= (1 - 1/t) \, x_t + z_{t+1} / t

    The gradient is taken at y, and the network is evaluated at x. Averaging and CProp shrink the same
    noise twice over, so CProp is overconfident here by default.

    Args:
        params: what it moves.
        lr: the step size gamma, constant.
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "c": c, "cprop_eps": cprop_eps, "training": True}
        super().__init__(params, defaults)

    def train(self) -> None:
        """Go to where gradients are taken: from x to y."""
        self._move(to_training=True)

    def eval(self) -> None:
        """Go to where the network is evaluated: from y to x."""
        self._move(to_training=False)

    @torch.no_grad()
    def _move(self, to_training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == to_training:
                continue
            beta1 = group["betas"][0]
            weight = 1 - beta1 if to_training else 1 - 1 / beta1
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = to_training

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move z by a scaled step of Adam without momentum, and y with it."""
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("the weights are where they are evaluated: call train() before step()")
            for p in group["params"]:
                if p.grad is not None:
                    self._one(p, p.grad, group)

    def _one(self, y: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[y]
        if not state:
            state |= {"t": 0, "z": y.clone(), "m": torch.zeros_like(y), "v": torch.zeros_like(y)}
        state["t"] += 1
        t, z, m, v = state["t"], state["z"], state["m"], state["v"]
        (beta1, beta2), lr = group["betas"], group["lr"]
        m.lerp_(g, 1 - beta2)
        v.lerp_(g * g, 1 - beta2)
        correction = 1 - beta2**t
        v_hat = v / correction
        scale = conformity_scale(m / correction, v_hat, correction / (1 - beta2), c=group["c"], eps=group["cprop_eps"])
        move = scale * g / (v_hat.sqrt() + group["eps"])
        # y without x in memory, as in the authors' own implementation.
        y.lerp_(z, 1 / t).add_(move, alpha=lr * (beta1 * (1 - 1 / t) - 1))
        z.sub_(move, alpha=lr)
