"""The arithmetic that rules are written in: torch's multiply-adds.

A weight is a Python number or a 0-dim tensor. A number uses torch's own kernel, so that a rule matches
torch's optimizer bit for bit. Those kernels do not accept a tensor; it uses the same formula instead,
without a host synchronization.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Number: TypeAlias = float | Tensor
"""A Python number, or a 0-dim tensor if reading its value would cost a host synchronization."""

__all__ = [
    "TINY",
    "Number",
    "add",
    "addcdiv",
    "addcmul",
    "as_scalar",
    "at_least",
    "clamp",
    "divide",
    "is_fake",
    "lerp",
    "one_minus_power",
    "plain_number",
    "squarable_or_zero",
]


TINY: Final = torch.finfo(torch.float32).tiny
"""Added to denominators that might be zero; negligible next to any other value."""


def plain_number(x: Any) -> Any:
    """A number of another library, such as NumPy's, as one of Python; anything else unchanged.

    Example:
        >>> from fractions import Fraction
        >>> plain_number(Fraction(1, 4)), plain_number(True), plain_number("normal")
        (0.25, True, 'normal')
    """
    if type(x) in (float, int, bool) or not isinstance(x, Real):
        return x
    return int(x) if isinstance(x, Integral) else float(x)


def divide(x: Tensor, by: Number, inverse: Number) -> Tensor:
    """``x / by``, as torch does it for a number; for a tensor, the faster ``x * inverse``."""
    return x * inverse if isinstance(by, Tensor) else x / by


def add(x: Tensor, y: Tensor, weight: Number) -> Tensor:
    """``x + weight * y``, as torch does it for a number, also if that is in a tensor that can be read at once."""
    if isinstance(weight, Tensor) and weight.is_cpu and not is_traced(weight):
        weight = weight.item()
    return x + weight * y if isinstance(weight, Tensor) else torch.add(x, y, alpha=weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """``x + weight * a * b``."""
    return x + weight * a * b if isinstance(weight, Tensor) else torch.addcmul(x, a, b, value=weight)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """``x + weight * a / b``."""
    return x + weight * a / b if isinstance(weight, Tensor) else torch.addcdiv(x, a, b, value=weight)


def lerp(x: Tensor, y: Tensor, weight: Number) -> Tensor:
    """``x + weight * (y - x)``."""
    return x + weight * (y - x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight)


def as_scalar(x: Number, dtype: torch.dtype) -> Tensor:
    """A number as a 0-dim tensor, for functions that accept only tensors.

    The tensor is on the CPU, whatever the default device: operations read it from there without synchronizing.
    """
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def at_least(x: Number, floor: float) -> Number:
    """The larger of a scalar and a constant, without a host synchronization if the scalar is a tensor."""
    return x.clamp_min(floor) if isinstance(x, Tensor) else max(x, floor)


def clamp(x: Tensor, low: Number, high: Number) -> Tensor:
    """``min(max(x, low), high)``."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(x, as_scalar(low, x.dtype)), as_scalar(high, x.dtype))
    return torch.clamp_max(torch.clamp_min(x, low), high)


def one_minus_power(beta: Number, t: Number) -> Number:
    r"""The bias correction :math:`1 - \beta^t`, at full precision for numbers and tensors.

    In float32, :math:`1 - 0.999` keeps only three digits; ``expm1`` keeps all of them. For :math:`\beta = 0` the
    logarithm is clamped to -1000, because infinity times :math:`t = 0` would be NaN.

    Example:
        >>> round(one_minus_power(0.9, 2.0), 6)
        0.19
        >>> round(one_minus_power(0.999, torch.tensor(1.0)).item(), 9)
        0.001
        >>> one_minus_power(0.0, torch.tensor([0.0, 1.0])).abs()  # the sign of zero depends on the processor
        tensor([0., 1.])
    """
    if isinstance(t, Tensor):
        if isinstance(beta, Tensor):
            return -torch.expm1(t * torch.log(beta).clamp_min(-1e3))
        return -torch.expm1(t * (math.log(beta) if beta > 0 else -1e3))
    return 1 - beta**t


def squarable_or_zero(x: Tensor) -> Tensor:
    r"""Replace NaN, infinity, and numbers whose square might overflow with zero.

    The limit in float32 is 2**60, about 1e18. It leaves room for the factor :math:`1 / (n - 1)` of the standard
    error, which is at most :math:`1 / \beta`.

    Example:
        >>> squarable_or_zero(torch.tensor([1.0, torch.nan, -torch.inf, 1e18, 1e21]))
        tensor([1.0000e+00, 0.0000e+00, 0.0000e+00, 1.0000e+18, 0.0000e+00])
    """
    exponent = math.frexp(torch.finfo(x.dtype).max)[1]
    if is_traced(x):
        return torch.where(torch.abs(x) < 2.0 ** (exponent // 2 - 4), x, 0.0)
    # By itself, a comparison takes several times as long as any other operation on a CPU, and torch has none for lists.
    # Multiplying by a power of two makes the same numbers overflow, and is exact for all others.
    scale = 2.0 ** (exponent // 2 + 4)
    return torch.nan_to_num(x * scale, nan=0.0, posinf=0.0, neginf=0.0) * (1 / scale)


def is_traced(x: Tensor) -> bool:
    """Whether a tensor stands for one in a compiled kernel, where other operations are fast."""
    return torch.compiler.is_compiling() or is_fake(x)


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no elements to read, but stands for one that has, as under ``FakeTensorMode``."""
    return isinstance(x, FakeTensor)
