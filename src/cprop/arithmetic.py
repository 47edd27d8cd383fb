"""torch's multiply-adds, with the weight a number or a 0-dim tensor.

Rules are written with these. A number takes torch's own kernel, so that a rule equals torch's
optimizer to the bit; a tensor, which those kernels refuse, takes the same formula without reading
the tensor back to the host.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
"""A Python number, or a 0-dim tensor where reading the number would cost a synchronisation."""

__all__ = ["add", "addcdiv", "addcmul", "clamp", "lerp", "one_minus_power"]


def add(x: Tensor, y: Tensor, weight: Number) -> Tensor:
    """``x + weight * y``."""
    return x + weight * y if isinstance(weight, Tensor) else torch.add(x, y, alpha=weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """``x + weight * a * b``."""
    return x + weight * a * b if isinstance(weight, Tensor) else torch.addcmul(x, a, b, value=weight)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """``x + weight * a / b``."""
    return x + weight * a / b if isinstance(weight, Tensor) else torch.addcdiv(x, a, b, value=weight)


def lerp(x: Tensor, y: Tensor, weight: Number) -> Tensor:
    """``x + weight * (y - x)``, which is ``y`` exactly at weight one."""
    return torch.lerp(x, y, weight)


def clamp(x: Tensor, low: Number, high: Number) -> Tensor:
    """``min(max(x, low), high)``."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(x, torch.as_tensor(low)), torch.as_tensor(high))
    return torch.clamp_max(torch.clamp_min(x, low), high)


def one_minus_power(beta: Number, t: Number) -> Number:
    r"""The bias correction :math:`1 - \beta^t`, to full precision in either type.

    A float32 tensor would keep three digits of :math:`1 - 0.999`; ``expm1`` keeps them all.

    Example:
        >>> round(one_minus_power(0.9, 2.0), 6)
        0.19
        >>> round(one_minus_power(0.999, torch.tensor(1.0)).item(), 9)
        0.001
    """
    if isinstance(t, Tensor):
        if isinstance(beta, Tensor):
            return -torch.expm1(t * torch.log(beta))
        return -torch.expm1(t * (math.log(beta) if beta > 0 else -math.inf))
    return 1 - beta**t
