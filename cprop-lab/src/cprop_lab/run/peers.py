"""Peers that no package has as they are needed here: Muon and Cautious AdamW.

torch's Muon takes matrices alone and orthogonalises in bfloat16, which takes four times as long as float32 on a
processor without bfloat16 arithmetic; a test holds this one to it. timm's Cautious AdamW cannot be imported beside a
CPU build of torch, because timm needs torchvision, which has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["CautiousAdamW", "Muon", "adam", "groups", "muon", "nesterov", "orthogonal_step", "orthogonalize"]

Average = Callable[[Tensor, dict[str, Any], float], Tensor]

QUINTIC: Final = (3.4445, -4.775, 2.0315)
"""Coefficients of the Newton-Schulz iteration (Jordan et al., 2024)."""


def adam(g: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float, t: int) -> tuple[Tensor, Tensor]:
    """Adam's mean and root mean square of the gradients, bias-corrected; the update is their quotient."""
    if "m" not in state:
        state |= {"m": torch.zeros_like(g), "v": torch.zeros_like(g)}
    m, v = state["m"], state["v"]
    beta1, beta2 = betas
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return m / (1 - beta1**t), (v / (1 - beta2**t)).sqrt_().add_(eps)


def nesterov(g: Tensor, state: dict[str, Any], mu: float) -> Tensor:
    """Nesterov's momentum."""
    if "b" not in state:
        state["b"] = torch.zeros_like(g)
    state["b"].lerp_(g, 1 - mu)
    return g.lerp(state["b"], mu)


def muon(g: Tensor, state: dict[str, Any], group: dict[str, Any], averaged: Average = nesterov) -> Tensor:
    """Muon's update of a group with ``orthogonal``, whose filters are the rows of a matrix; Adam's of any other."""
    if not group["orthogonal"]:
        m, root = adam(g, state, group["betas"], group["eps"], state["t"])
        return m.div_(root)
    return orthogonal_step(averaged(g, state, group["momentum"]))


def orthogonal_step(momentum: Tensor, noise: Tensor | None = None) -> Tensor:
    """An orthogonal matrix, of the size of AdamW's updates (Liu et al.)."""
    matrix = momentum.flatten(1)
    return orthogonalize(matrix, noise).mul_(0.2 * math.sqrt(max(matrix.shape))).view_as(momentum)


class Peer(Optimizer):
    """An optimizer with decoupled weight decay whose rule is written for one parameter at a time."""

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """What is subtracted from a parameter, times the learning rate."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["t"] = state.get("t", 0) + 1
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(self.direction(p.grad, state, group), alpha=group["lr"])
        return loss


class CautiousAdamW(Peer):
    r"""AdamW that only moves the elements whose update agrees in sign with the gradient.

    .. math::
        \phi = [m \cdot g > 0], \qquad
        \theta \leftarrow (1 - \gamma\lambda)\,\theta
            - \gamma\, \frac{\phi}{\max(\bar\phi, 10^{-3})} \cdot \frac{\hat m}{\sqrt{\hat v} + \epsilon}

    Args:
        params: what it moves.
        lr: the learning rate.
        betas: of the averages.
        eps: added to the root.
        weight_decay: decoupled.

    Example:
        >>> w = nn.Parameter(torch.ones(3))
        >>> optimizer = CautiousAdamW([w], lr=0.1)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.detach()
        tensor([0.9000, 0.9000, 0.9000])

    References:
        Liang et al., *Cautious Optimizers*, 2024.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Adam's update where it agrees with the gradient, scaled up by how much is left out."""
        m, root = adam(g, state, group["betas"], group["eps"], state["t"])
        agree = (m * g > 0).to(g.dtype)
        return m.div_(root).mul_(agree).div_(agree.mean().clamp_(min=1e-3))


class Muon(Peer):
    r"""Muon for hidden matrices, and AdamW for the rest, at one learning rate.

    .. math::
        b \leftarrow \mu b + (1 - \mu)\, g, \qquad
        \theta \leftarrow (1 - \gamma\lambda)\,\theta
            - 0.2\,\gamma \sqrt{\max(r, c)}\; \mathrm{orthogonalize}\bigl((1 - \mu)\, g + \mu\, b\bigr)

    for a matrix of r rows and c columns. The factor gives its updates the size of AdamW's, so that both
    share a learning rate and weight decay (Liu et al.).

    Args:
        params: groups, those with matrices marked by ``orthogonal``; see :func:`groups`.
        lr: the learning rate.
        momentum: of the matrices.
        betas: of AdamW's averages.
        eps: added to AdamW's root.
        weight_decay: decoupled.

    Example:
        >>> w = nn.Parameter(torch.eye(2))
        >>> optimizer = Muon([{"params": [w], "orthogonal": True}], lr=0.1)
        >>> (3 * w.diagonal().sum()).backward()
        >>> optimizer.step()
        >>> bool((w.diagonal() < 1).all())
        True

    References:
        Jordan et al., *Muon: an optimizer for hidden layers in neural networks*, 2024.
        Liu et al., *Muon is Scalable for LLM Training*, 2025.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "orthogonal": False})

    averaged = staticmethod(nesterov)

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """An orthogonal matrix, or Adam's update."""
        return muon(g, state, group, self.averaged)


def orthogonalize(matrix: Tensor, noise: Tensor | None = None, steps: int = 5) -> Tensor:
    r"""Bring all singular values close to one, by Newton-Schulz iterations.

    .. math::
        X \leftarrow P X, \qquad P = aI + bG + cG^2, \qquad G = XX^\top + D

    G and all P commute, so the iterations are those of a small matrix, :math:`G \leftarrow PGP`, and X is multiplied by
    the product of all P once: for 300 x 784, two thirds of the time on a CPU.

    Args:
        matrix: with any singular values.
        noise: the diagonal of D, as long as the shorter side: the result is :math:`(MM^\top + D)^{-1/2} M`; else zero.
        steps: number of iterations; after five, the singular values are between 0.7 and 1.2 or so.

    Example:
        >>> values = torch.linalg.svdvals(orthogonalize(torch.diag(torch.tensor([9.0, 1.0, 0.1]))))
        >>> bool(((0.5 < values) & (values < 1.5)).all())
        True
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    size = x.norm() if noise is None else (x.square().sum() + noise.sum()).sqrt()
    size = size.clamp(min=1e-7)
    x = x / size
    g = x @ x.T
    if noise is not None:
        g.diagonal().add_(noise / size.square())
    product = p = _quintic(g)
    for _ in range(steps - 1):
        g = p @ g @ p
        p = _quintic(g)
        product = p @ product
    x = torch.mm(product, x)
    return (x.T if tall else x).contiguous()


def _quintic(g: Tensor) -> Tensor:
    """The matrix that one Newton-Schulz iteration multiplies by."""
    a, b, c = QUINTIC
    p = torch.addmm(g, g, g, beta=b, alpha=c)
    p.diagonal().add_(a)
    return p


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups for Muon: hidden matrices, and the rest.

    As its authors advise, embeddings and the output layer are not hidden; the latter is the last ``nn.Linear`` of the
    network.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        >>> [[tuple(p.shape) for p in group["params"]] for group in groups(model)]
        [[(4, 4)], [(9, 4), (4,), (2, 4), (2,)]]
    """
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    visible = [*(module.weight for module in model.modules() if isinstance(module, nn.Embedding)), *linear[-1:]]
    ids = set(map(id, visible))
    hidden = [p for p in model.parameters() if p.ndim > 1 and id(p) not in ids]
    matrices = set(map(id, hidden))
    rest = [p for p in model.parameters() if id(p) not in matrices]
    both: list[dict[str, Any]] = [{"params": hidden, "orthogonal": True}, {"params": rest}]
    return [group for group in both if group["params"]]
