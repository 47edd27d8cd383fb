"""CProp as written in the paper, formula by formula: the baseline for the library's timings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class AuthorsCProp:
    """An optimizer + Algorithm 1, with one torch operation per formula."""

    def __init__(self, inner: torch.optim.Optimizer, beta: float = 0.999, c: float = 1.0, eps: float = 1e-8) -> None:
        self.inner, self.beta, self.c, self.eps = inner, beta, c, eps
        self.param_groups = inner.param_groups
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """One step of Algorithm 1."""
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in params]
        self.inner.step()
        for p, start in zip(params, before, strict=True):
            assert p.grad is not None
            g = p.grad
            state = self.state.setdefault(p, {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)})
            state["t"] += 1
            state["m"] = self.beta * state["m"] + (1 - self.beta) * g
            state["v"] = self.beta * state["v"] + (1 - self.beta) * g**2
            correction = 1 - self.beta ** state["t"]
            m_hat, v_hat = state["m"] / correction, state["v"] / correction
            n = correction / (1 - self.beta)
            sigma = torch.sqrt(torch.clamp_min(v_hat - m_hat**2, 0) / (n - 1 + self.eps)) + self.eps
            negative = 0.5 * (1 + torch.erf((0 - m_hat) / (sigma * math.sqrt(2))))
            scale = torch.clamp_max(2 * self.c * torch.abs(negative - 0.5), 1)
            p.copy_(start + scale * (p - start))
