"""The laboratory's own measures: controls, and shapes of the scale that the paper did not try.

All start from CProp's :math:`s_t`. None is meant for use outside experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cprop import MEASURES, Measure, Moments
from cprop.arithmetic import divided

__all__ = ["OWN", "fourth_power_of_s", "layer_mean", "root_of_s", "square_of_s"]


def conformity(moments: Moments) -> Tensor:
    r"""CProp's own :math:`s_t` (equations 2 and 3)."""
    return divided(MEASURES["normal"](moments))


def layer_mean(moments: Moments) -> Tensor:
    """CProp's scale, averaged over a tensor and the same for all of its elements.

    What it saves, CProp saves through when and in which layers it slows down; the rest, through which parameters it
    slows. It needs whole tensors, so it cannot be fused.
    """
    s = conformity(moments)
    return s.mean().expand_as(s)


def root_of_s(moments: Moments) -> Tensor:
    r""":math:`\sqrt{s_t}`: milder on parameters whose gradients disagree."""
    return torch.sqrt(conformity(moments))


def square_of_s(moments: Moments) -> Tensor:
    r""":math:`s_t^2`: harder on them; it falls to zero with the square of the mean."""
    return torch.square(conformity(moments))


def fourth_power_of_s(moments: Moments) -> Tensor:
    r""":math:`s_t^4`: harder still; pure noise, whose :math:`s_t` is 0.39 in the mean, hardly moves a parameter."""
    return torch.square(square_of_s(moments))


OWN: Final[Mapping[str, Measure]] = {
    measure.__name__: measure for measure in (layer_mean, root_of_s, square_of_s, fourth_power_of_s)
}
"""By name."""
