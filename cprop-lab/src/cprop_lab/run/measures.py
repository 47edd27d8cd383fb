"""The laboratory's own measures: controls of the scale, and other powers of it. None is for use outside experiments."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cprop import MEASURES, Measure, Moments
from cprop_lab.registry import Registry

__all__ = ["OWN", "conformity", "fourth_power_of_s", "layer_mean", "register_measure", "root_of_s", "square_of_s"]


def conformity(moments: Moments) -> Tensor:
    r"""CProp's own :math:`s_t` (equations 2 and 3)."""
    return MEASURES["normal"](moments)


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


OWN: Final[Registry[Measure]] = Registry(
    "measure", {measure.__name__: measure for measure in (layer_mean, root_of_s, square_of_s, fourth_power_of_s)}
)
"""By name: those that the library does not have."""


def register_measure(name: str, measure: Measure, version: str | None = None) -> None:
    """Add a measure of your own, for ``cprop_measure`` in all commands that are given your module as ``--with MODULE``.

    Args:
        name: lower-case letters, digits and underscores.
        measure: of conformity, a function of :class:`cprop.Moments`.
        version: what identifies it in a run's id; by default a digest of your module's source.

    Raises:
        ValueError: if the name is taken, or malformed.

    Example:
        >>> register_measure("unscaled", lambda moments: torch.ones_like(moments.m), version="1")
    """
    if name in MEASURES:
        raise ValueError(f"there is a measure {name!r} in cprop already: choose another name")
    OWN.add(name, measure, version, above=2)
