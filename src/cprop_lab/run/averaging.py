"""Optimizers that average inside: GPA, and research rows, GPA and Schedule-Free scaled by CProp. Not in the library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop import conformity_scale
from cprop_lab.run.measures import OWN
from cprop_lab.run.names import PAPERS_EPS
from cprop_lab.run.peers import muon

__all__ = ["GPA", "ScheduleFreeCProp"]


class PrimalAveraging(Optimizer):
    r"""Takes gradients at y, between a sequence z of plain steps and its average x, where the network is evaluated.

    .. math::
        y_t &= (1 - \mu) \, z_t + \mu \, x_t \\
        z_{t+1} &= z_t - \gamma \, d_t \\
        x_{t+1} &= (1 - w_t) \, x_t + w_t \, z_{t+1}

    The parameters hold y in training and x in evaluation; z is state.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {**defaults, "training": True})

    def interpolation(self, group: dict[str, Any]) -> float:
        """The weight mu of the average where gradients are taken."""
        raise NotImplementedError

    def newest(self, group: dict[str, Any], t: int) -> float:
        """The weight w of the newest z in the average."""
        raise NotImplementedError

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """How z moves, divided by the learning rate."""
        raise NotImplementedError

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
            mu = self.interpolation(group)
            weight = 1 - mu if to_training else 1 - 1 / mu
            for p in group["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = to_training

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move z, and y with it."""
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("the weights are where they are evaluated: call train() before step()")
            for y in group["params"]:
                if y.grad is not None:
                    state = self.state[y]
                    if not state:
                        state |= {"t": 0, "z": y.clone()}
                    state["t"] += 1
                    z, w = state["z"], self.newest(group, state["t"])
                    move = self.direction(y.grad, state, group)
                    # y without x in memory, as in Schedule-Free's own implementation.
                    y.lerp_(z, w).add_(move, alpha=group["lr"] * (self.interpolation(group) * (1 - w) - 1))
                    z.sub_(move, alpha=group["lr"])


class GPA(PrimalAveraging):
    r"""AdamW or Muon with Generalized Primal Averaging, and if wanted CProp's scale on the base sequence.

    .. math::
        d_t = \hat s_t \, u_t + \lambda z_t, \qquad \mu = \mu_y, \qquad
        w_t = \begin{cases} 1 - \mu_x \\ 1 / (f t + 1 - f) & \text{with a window that grows} \end{cases}

    u is the update of the optimizer inside: Muon's for groups with ``orthogonal``, AdamW's for all others. A window
    that grows covers the fraction f of the run so far, and weighs the weights at t in proportion to
    :math:`t^{1/f - 1}`; all of it, f = 1, is Schedule-Free's average.

    Args:
        params: what it moves.
        lr: the learning rate.
        betas: of AdamW's averages.
        eps: added to the root.
        momentum: of Muon's matrices.
        weight_decay: decoupled, of z.
        mu_x: how much of the average a step keeps; 0.9967 averages over about 300 steps.
        mu_y: the weight of the average where gradients are taken.
        window: the fraction f, in place of ``mu_x``; 0 for none.
        c: CProp's overconfidence; infinity for none of its scale.
        beta: of CProp's statistics.
        measure: of conformity, by name.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = GPA([w], lr=0.1, mu_x=0.0)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> w.detach()
        tensor([0.9000, 0.9000, 0.9000])

    References:
        Defazio et al., *Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs*, 2025.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        mu_x: float = 0.9967,
        mu_y: float = 0.7,
        window: float = 0.0,
        c: float = math.inf,
        beta: float = 0.999,
        measure: str = "normal",
    ) -> None:
        inside = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        average = {"mu_x": mu_x, "mu_y": mu_y, "window": window}
        super().__init__(params, **inside, **average, c=c, beta=beta, measure=measure, orthogonal=False)

    def interpolation(self, group: dict[str, Any]) -> float:
        """As set."""
        return float(group["mu_y"])

    def newest(self, group: dict[str, Any], t: int) -> float:
        """The same at every step, an exponential average; or ever less."""
        window: float = group["window"]
        return 1 / (window * t + 1 - window) if window else 1 - float(group["mu_x"])

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The update of the optimizer inside, scaled by CProp, and weight decay."""
        update = muon(g, state, group)
        if group["c"] < math.inf:
            update *= self._scale(g, state, group)
        return update.add_(state["z"], alpha=group["weight_decay"])

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
