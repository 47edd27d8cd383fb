"""Measures of conformity that the search tried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cprop import Measure, Moments
from cprop_lab.run.measures import conformity

__all__ = ["MEASURES", "Relative", "exact_count", "positive_part", "whole_layer", "wiener", "z_of_exact_count"]

TINY: Final = 1e-12


def whole_layer(moments: Moments) -> Tensor:
    r"""CProp's scale of a whole tensor: is its mean gradient longer than noise would make it?

    .. math::
        z^2 = \sum_i \hat m_i^2 \Big/ \sum_i \sigma_i^2

    A single element can hardly tell signal from noise in a thousand gradients; a tensor has thousands of elements.
    It needs whole tensors too.
    """
    rms = Moments(moments.m.square().mean().sqrt(), moments.v.mean(), moments.k)
    return conformity(rms).expand_as(moments.m)


def exact_count(moments: Moments) -> Tensor:
    r"""CProp with the count that an exponential mean is worth.

    The paper's :math:`n_t` counts :math:`1/(1-\beta)` gradients in the long run. An exponential mean is worth
    :math:`(1+\beta)/(1-\beta)`, twice as many: for pure noise, :math:`s_t` is then uniform in [0, 1], and not 0.39 in
    the mean.
    """
    return torch.erf(z_of_exact_count(moments) / math.sqrt(2))


def z_of_exact_count(moments: Moments) -> Tensor:
    r"""The mean in its own standard errors: :math:`1/k_t = n_t (1+\beta) / (1+\beta^t)` gradients."""
    n, b = moments.k.n, moments.k.b
    worth = n * (2 - b / n) / (2 - b)  # beta is 1 - b / n, and beta^t is 1 - b
    return moments.z * ((worth - 1) / (n - 1 + TINY)) ** 0.5


def wiener(moments: Moments) -> Tensor:
    r""":math:`z^2 / (1 + z^2)`: minimises the expected squared error of a scaled mean."""
    squared = torch.square(z_of_exact_count(moments))
    return squared / (1 + squared)


def positive_part(moments: Moments) -> Tensor:
    r""":math:`\max(0, 1 - 1/z^2)`, as James and Stein shrink a mean: a mean within its error does not move."""
    return torch.relu(1 - 1 / torch.square(z_of_exact_count(moments)).clamp(min=TINY))


class Relative:
    r"""Tells parameters apart without slowing them down: conformity divided by its mean over the tensor.

    .. math::
        \hat s = \min(s / \bar s, b) \, \bar s^{\gamma} / b

    At a learning rate b times as large, the mean step of a tensor is that of the optimizer inside, except for what the
    bound cuts off. It needs whole tensors, so it cannot be fused.

    Args:
        bound: the largest factor b.
        slowing: the exponent gamma; one slows down as CProp does.
    """

    def __init__(self, bound: float, slowing: float = 0.0) -> None:
        self.bound, self.slowing = bound, slowing

    def __call__(self, moments: Moments) -> Tensor:
        """The relative measure."""
        s = conformity(moments)
        mean = s.mean().clamp(min=TINY)
        return torch.clamp(s / mean, max=self.bound) * mean**self.slowing / self.bound


MEASURES: Final[Mapping[str, Measure]] = {
    **{measure.__name__: measure for measure in (whole_layer, exact_count, wiener, positive_part)},
    **{f"relative_{bound:g}": Relative(bound) for bound in (2.0, 3.0, 5.0)},
    "relative_3_slowing_half": Relative(3.0, slowing=0.5),
}
"""By name."""
