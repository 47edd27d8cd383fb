"""The arithmetic that rules are written in: torch's multiply-adds, and quotients with a deferred division.

A weight is a Python number or a 0-dim tensor. A number uses torch's own kernel, so that a rule matches
torch's optimizer bit for bit. Those kernels do not accept a tensor; it uses the same formula instead,
without a host synchronization.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
"""A Python number, or a 0-dim tensor if reading its value would cost a host synchronization."""

__all__ = [
    "Divisor",
    "Factor",
    "Number",
    "Quotient",
    "add",
    "addcdiv",
    "addcmul",
    "as_scalar",
    "clamp",
    "divide",
    "divided",
    "lerp",
    "normal_as_quotient",
    "one_minus_power",
    "squarable_or_zero",
]


class Quotient(NamedTuple):
    """A factor whose division is deferred, so that it can be merged with another one.

    Division is the slowest part of a compiled step; a quotient of products needs only one.
    """

    numerator: Tensor
    denominator: Tensor


Factor: TypeAlias = Tensor | Quotient


class Divisor(NamedTuple):
    """A scalar to divide by, and its inverse for when multiplying is faster."""

    value: Number
    inverse: Number

    @classmethod
    def of(cls, value: Number) -> Divisor:
        """The scalar and its inverse."""
        return cls(value, 1 / value)


def divide(x: Tensor, by: Divisor) -> Tensor:
    """``x / by``: as torch does it if the divisor is a number; multiplied by its inverse if it is a tensor."""
    return x * by.inverse if isinstance(by.value, Tensor) else x / by.value


def divided(factor: Factor) -> Tensor:
    """The factor as a tensor."""
    return factor.numerator / factor.denominator if isinstance(factor, Quotient) else factor


def add(x: Tensor, y: Tensor, weight: Number, factor: Factor | None = None) -> Tensor:
    """``x + weight * factor * y``."""
    if isinstance(factor, Quotient):
        return addcdiv(x, factor.numerator * y, factor.denominator, weight)
    if factor is not None:
        y = factor * y
    return x + weight * y if isinstance(weight, Tensor) else torch.add(x, y, alpha=weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """``x + weight * a * b``."""
    return x + weight * a * b if isinstance(weight, Tensor) else torch.addcmul(x, a, b, value=weight)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, weight: Number, factor: Factor | None = None) -> Tensor:
    """``x + weight * factor * a / b``."""
    if isinstance(factor, Quotient):
        a, b = factor.numerator * a, factor.denominator * b
    elif factor is not None:
        a = factor * a
    return x + weight * a / b if isinstance(weight, Tensor) else torch.addcdiv(x, a, b, value=weight)


def lerp(x: Tensor, y: Tensor, weight: Number) -> Tensor:
    """``x + weight * (y - x)``."""
    return x + weight * (y - x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight)


def as_scalar(x: Number, dtype: torch.dtype) -> Tensor:
    """A number as a 0-dim tensor, for functions that accept only tensors.

    The tensor is on the CPU, whatever the default device: operations read it from there without synchronizing.
    """
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


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
    if isinstance(x, Tensor):
        return torch.where(torch.abs(x) < 2.0 ** (exponent // 2 - 4), x, 0.0)
    # torch has no foreach comparisons. Multiplying by a power of two makes the same numbers overflow, and is exact
    # for all others.
    scale = 2.0 ** (exponent // 2 + 4)
    return torch.nan_to_num(x * scale, nan=0.0, posinf=0.0, neginf=0.0) * (1 / scale)


_ROOT: Final = (
    0.19947443404195642,
    0.09941380125851447,
    0.02661719158488317,
    0.004513535179824006,
    0.002745906358431786,
    -0.0008561824681374186,
    0.0005914716410608891,
    -0.0001363501882502475,
    1.8672712939387624e-05,
)
"""Coefficients, from z to z^9, of a polynomial that approximates the fourth root of 1 / (1 - s) on [0, 5.5]."""


def normal_as_quotient(z: Tensor) -> Quotient:
    r"""Probability that a standard normal variable is closer to zero than :math:`z \ge 0`, in float32.

    .. math::
        s(z) = \operatorname{erf}(z / \sqrt 2) \approx 1 - 1 / p(z)^4

    with a polynomial :math:`p` of degree nine, as in Abramowitz and Stegun 7.1.28. The error is below 1e-6.

    Example:
        >>> divided(normal_as_quotient(torch.tensor([0.0, 1.0, 100.0])))
        tensor([0.0000, 0.6827, 1.0000])
    """
    z = torch.clamp_max(z, 5.5)  # there 1 - s is 4e-8, and the power is far from overflow
    p = z * _ROOT[-1] + _ROOT[-2]
    for coefficient in _ROOT[-3::-1]:
        p = z * p + coefficient
    p = z * p + 1.0
    p = p * p
    p = p * p
    return Quotient(p - 1.0, p)
