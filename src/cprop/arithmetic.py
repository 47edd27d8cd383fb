"""The arithmetic that rules are written in.

torch's multiply-adds, with the weight a number or a 0-dim tensor: a number takes torch's own kernel,
so that a rule equals torch's optimizer to the bit; a tensor, which those kernels refuse, takes the
same formula without reading the tensor back to the host. And quotients that are not divided yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
    "clamp",
    "divide",
    "divided",
    "erf",
    "expanded_functions",
    "lerp",
    "one_minus_power",
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


_expand: ContextVar[bool] = ContextVar("expand", default=False)


@contextmanager
def expanded_functions(expand: bool) -> Iterator[None]:
    """Write ``erf`` out in multiplications while this lasts: for tracing kernels that run on a CPU.

    There, the library's ``erf`` takes longer than all the rest of a step; in a GPU's it is free.
    """
    token = _expand.set(expand)
    try:
        yield
    finally:
        _expand.reset(token)


_ERFC_ROOT: Final = (
    0.14105043497321176,
    0.0894721857106006,
    0.024829185689008555,
    0.0026692244553448616,
    0.0021926494516187793,
    -0.00026469565437677614,
    0.00016335775629201294,
)
"""Coefficients of a polynomial near the eighth root of 1 / erfc(x), from x to x^7, on [0, 3.9]."""


def erf(x: Tensor) -> Factor:
    r"""The error function of a number that is not negative.

    Written out, it is :math:`1 - 1 / p(x)^8` with a polynomial :math:`p` of degree seven, in the manner
    of Abramowitz and Stegun 7.1.28: in float32 within 1e-6 of the function, and a quotient still.

    Example:
        >>> with expanded_functions(True):
        ...     divided(erf(torch.tensor([0.0, 1.0, 100.0])))
        tensor([0.0000, 0.8427, 1.0000])
        >>> erf(torch.tensor([0.0, 1.0, 100.0]))
        tensor([0.0000, 0.8427, 1.0000])
    """
    if not _expand.get():
        return torch.erf(x)
    x = torch.clamp_max(x, 3.9)  # where erfc is 3e-8, and the power far from overflow
    p = x * _ERFC_ROOT[-1] + _ERFC_ROOT[-2]
    for coefficient in _ERFC_ROOT[-3::-1]:
        p = x * p + coefficient
    p = x * p + 1.0
    p = p * p
    p = p * p
    p = p * p
    return Quotient(p - 1.0, p)
