"""The arithmetic that rules are written in.

torch's multiply-adds, with the weight a number or a 0-dim tensor: a number takes torch's own kernel,
so that a rule equals torch's optimizer to the bit; a tensor, which those kernels refuse, takes the
same formula without reading the tensor back to the host. And quotients that are not divided yet.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
"""A Python number, or a 0-dim tensor where reading the number would cost a synchronisation."""

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
    """A factor that is not divided yet, so that its division can be merged with another one.

    Division is what a compiled step waits for; a quotient of products has one.
    """

    numerator: Tensor
    denominator: Tensor


Factor: TypeAlias = Tensor | Quotient


class Divisor(NamedTuple):
    """A scalar to divide by, and its inverse for where multiplying is faster."""

    value: Number
    inverse: Number

    @classmethod
    def of(cls, value: Number) -> Divisor:
        """The scalar and its inverse."""
        return cls(value, 1 / value)


def divide(x: Tensor, by: Divisor) -> Tensor:
    """``x / by``: as torch does it where the divisor is a number, and by its inverse where it is a tensor."""
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
    """A number as a 0-dim tensor for functions that take no other.

    It lies on the host, whatever the default device is: an operation takes it from there without waiting.
    """
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def clamp(x: Tensor, low: Number, high: Number) -> Tensor:
    """``min(max(x, low), high)``."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(x, as_scalar(low, x.dtype)), as_scalar(high, x.dtype))
    return torch.clamp_max(torch.clamp_min(x, low), high)


def one_minus_power(beta: Number, t: Number) -> Number:
    r"""The bias correction :math:`1 - \beta^t`, to full precision in either type.

    A float32 tensor would keep three digits of :math:`1 - 0.999`; ``expm1`` keeps them all. The logarithm of
    :math:`\beta = 0` is a number so low that its powers vanish: times :math:`t = 0`, infinity would be NaN.

    Example:
        >>> round(one_minus_power(0.9, 2.0), 6)
        0.19
        >>> round(one_minus_power(0.999, torch.tensor(1.0)).item(), 9)
        0.001
        >>> one_minus_power(0.0, torch.tensor([0.0, 1.0])).abs()  # whatever sign a processor gives to zero
        tensor([0., 1.])
    """
    if isinstance(t, Tensor):
        if isinstance(beta, Tensor):
            return -torch.expm1(t * torch.log(beta).clamp_min(-1e3))
        return -torch.expm1(t * (math.log(beta) if beta > 0 else -1e3))
    return 1 - beta**t


def squarable_or_zero(x: Tensor) -> Tensor:
    r"""Replace NaN, infinity, and numbers whose square is not safely finite by zero.

    The limit is 2**60, about 1e18, in float32: a square then leaves room for the factor :math:`1 / (n - 1)` of the
    standard error, which is at most :math:`1 / \beta`.

    Example:
        >>> squarable_or_zero(torch.tensor([1.0, torch.nan, -torch.inf, 1e18, 1e21]))
        tensor([1.0000e+00, 0.0000e+00, 0.0000e+00, 1.0000e+18, 0.0000e+00])
    """
    exponent = math.frexp(torch.finfo(x.dtype).max)[1]
    if isinstance(x, Tensor):
        return torch.where(torch.abs(x) < 2.0 ** (exponent // 2 - 4), x, 0.0)
    # There are no comparisons of lists. Multiplied by a power of two, the same numbers overflow, and all others keep
    # their digits.
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
"""Coefficients, from z to z^9, of a polynomial near the fourth root of 1 / (1 - s) on [0, 5.5]."""


def normal_as_quotient(z: Tensor) -> Quotient:
    r"""Probability that a standard normal variable is nearer to zero than :math:`z \ge 0`, in float32.

    .. math::
        s(z) = \operatorname{erf}(z / \sqrt 2) \approx 1 - 1 / p(z)^4

    with a polynomial :math:`p` of degree nine, in the manner of Abramowitz and Stegun 7.1.28. The error is below 1e-6.

    Example:
        >>> divided(normal_as_quotient(torch.tensor([0.0, 1.0, 100.0])))
        tensor([0.0000, 0.6827, 1.0000])
    """
    z = torch.clamp_max(z, 5.5)  # where 1 - s is 4e-8, and the power far from overflow
    p = z * _ROOT[-1] + _ROOT[-2]
    for coefficient in _ROOT[-3::-1]:
        p = z * p + coefficient
    p = z * p + 1.0
    p = p * p
    p = p * p
    return Quotient(p - 1.0, p)
