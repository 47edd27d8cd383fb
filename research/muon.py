"""Muon with an estimate of the noise: Muon-VS, of others, and Muon-SNR, an attempt of our own."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from cprop_lab.run.peers import Muon, nesterov, orthogonal_step

__all__ = ["MuonSNR", "MuonVS"]

TINY: Final = 1e-12


def in_deviations(g: Tensor, state: dict[str, Any], mu: float) -> Tensor:
    """Nesterov's momentum, bias-corrected, in standard deviations of the gradients."""
    if "b" not in state:
        state |= {"b": torch.zeros_like(g), "gamma": torch.zeros_like(g)}
    apart = state["b"] - g
    state["gamma"].mul_(mu).addcmul_(apart, apart, value=mu * (1 - mu))
    b = state["b"].lerp_(g, 1 - mu) / (1 - mu ** state["t"])
    deviation: Tensor = state["gamma"].sqrt().add_(TINY)
    return g.lerp(b, mu) / deviation


class MuonVS(Muon):
    r"""Muon whose momentum is divided by the standard deviation of the gradients before it is orthogonalised.

    .. math::
        \Gamma \leftarrow \mu\,\Gamma + \mu (1 - \mu)(b - g)^2, \qquad
        b \leftarrow \mu b + (1 - \mu)\, g, \qquad
        \mathrm{orthogonalize}\Bigl(\frac{(1 - \mu)\, g + \mu\, \hat b}{\sqrt{\Gamma}}\Bigr)

    with a bias-corrected :math:`\hat b`; that of :math:`\Gamma` would cancel out.

    Example:
        >>> w = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = MuonVS([{"params": [w], "orthogonal": True}], lr=0.1)
        >>> (w.diagonal() * torch.tensor([3.0, 0.1])).sum().backward()
        >>> optimizer.step()
        >>> w.detach().diag().diff().abs() < 1e-6  # both gradients are equally certain
        tensor([True])

    References:
        Li et al., *Variance-Adaptive Muon*, 2026.
    """

    averaged = staticmethod(in_deviations)


class MuonSNR(Muon):
    r"""Muon that moves along each singular direction as far as the momentum stands out from its noise there.

    CProp's question, asked of directions instead of elements: a direction with singular value s, in noise of size e,
    gets :math:`s / \sqrt{s^2 + \kappa^2 e^2}` of Muon's step. One number per row estimates the noise.

    .. math::
        q &\leftarrow \mu q + (1 - \mu) \sum_j g_{\cdot j}^2 \\
        D &= \kappa^2 \, \frac{1 - \mu}{2 \mu}
            \operatorname{diag} \Bigl( (1 - \mu^t)\, q - \sum_j b_{\cdot j}^2 \Bigr)_+ \\
        U &= (MM^\top + D)^{-1/2} M

    where M is Muon's momentum, with its shorter side as rows, and D / kappa^2 the expected Gram matrix of the noise in
    b. At the first step D is zero.

    Args:
        params: groups, those with matrices marked by ``orthogonal``; see :func:`cprop_lab.run.peers.groups`.
        lr: the learning rate.
        noise: kappa; zero gives Muon.
        settings: of :class:`cprop_lab.run.peers.Muon`.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = MuonSNR([{"params": [w], "orthogonal": True}], lr=0.1)
        >>> for sign in (1.0, -1.0) * 50:  # the first row's gradients agree, the second's do not
        ...     w.grad = torch.tensor([[1.0, 0.0], [0.0, sign]])
        ...     optimizer.step()
        >>> bool(w[0, 0].abs() > 5 * w[1, 1].abs())
        True
    """

    def __init__(self, params: Any, lr: float = 1e-3, noise: float = 1.0, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        for group in self.param_groups:
            group["noise"] = noise

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Muon's, shorter where the momentum is noise."""
        if not group["orthogonal"]:
            return super().direction(g, state, group)
        mu, t = group["momentum"], state["t"]
        matrix = g.flatten(1)
        longer = 1 if matrix.size(0) <= matrix.size(1) else 0
        if "q" not in state:
            state["q"] = matrix.new_zeros(min(matrix.shape))
        state["q"].lerp_(matrix.square().sum(longer), 1 - mu)
        ahead = nesterov(g, state, mu)
        spread = (1 - mu**t) * state["q"] - state["b"].flatten(1).square().sum(longer)
        noise = spread.clamp_(min=0).mul_(group["noise"] ** 2 * (1 - mu) / (2 * mu))
        return orthogonal_step(ahead, noise)
