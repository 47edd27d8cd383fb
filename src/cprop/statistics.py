r"""The running mean and mean square of each element's gradient, and the resulting scale.

.. math::
    m_t &= \beta m_{t-1} + (1 - \beta) g_t   & \hat m_t &= m_t / (1 - \beta^t) \\
    v_t &= \beta v_{t-1} + (1 - \beta) g_t^2 & \hat v_t &= v_t / (1 - \beta^t)

The state of a parameter is a dictionary with the keys below. The prefix ``cprop_`` keeps them apart
from an inner optimizer's keys in the same ``state_dict``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import Number, addcmul, lerp, one_minus_power, plain_number
from cprop.conformity import finite, scale_of
from cprop.measures import Measure, needs_mean_abs
from cprop.moments import Corrections, Moments

__all__ = ["AVERAGES", "EARLIER", "MEAN", "MEAN_ABS", "MEAN_SQUARE", "PREFIX", "STEP", "StatisticsScalars"]

PREFIX: Final = "cprop_"
STEP: Final = "cprop_step"
r"""Number of gradients this parameter has seen: one counter per parameter, not one per optimizer.

After :math:`\beta` is raised, the equivalent number for the new value: see :func:`steps_at`.
"""
EARLIER: Final = "cprop_earlier"
r"""Number of gradients no longer counted in ``STEP`` because :math:`\beta` was raised; absent if it never was."""
MEAN: Final = "cprop_m"
MEAN_SQUARE: Final = "cprop_v"
MEAN_ABS: Final = "cprop_a"
AVERAGES: Final = (MEAN, MEAN_SQUARE, MEAN_ABS)


class StatisticsScalars(NamedTuple):
    """The scalars for one step of the statistics, computed once for all elements."""

    beta: Number
    weight: Number
    """Weight of a new gradient in the averages, 1 - beta."""
    c: Number
    unbounded: bool
    """Whether ``c`` may be infinite without it being known: a tensor is not read."""
    corrections: Corrections


def statistics_scalars(group: Mapping[str, Any], t: Number, square_t: Number | None = None) -> StatisticsScalars:
    r"""The scalars of a parameter group at a parameter's step ``t``.

    .. math::
        n_t = \frac{1 - \beta^t}{1 - \beta} = 1 + \frac{\beta (1 - \beta^{t-1})}{1 - \beta}

    The second form is exactly one at :math:`t = 1` in any precision.

    Args:
        group: a param group, with ``cprop_beta``, ``cprop_c`` and ``cprop_eps``.
        t: gradients seen by the mean.
        square_t: gradients seen by the mean square, if that is shared with Adam; ``t`` by default.
    """
    beta, c, eps = (plain_number(group[name]) for name in ("cprop_beta", "cprop_c", "cprop_eps"))
    corrections = Corrections.of(
        n=1 + beta * one_minus_power(beta, t - 1) / (1 - beta),
        eps=eps,
        b=one_minus_power(beta, t),
        b_v=one_minus_power(beta, t if square_t is None else square_t),
    )
    unbounded = isinstance(c, Tensor)
    c = c if unbounded or math.isinf(c) else finite(c)
    return StatisticsScalars(beta, 1 - beta, c, unbounded, corrections)


def steps_at(beta: float, t: float, before: float) -> float:
    r"""The step at which averages with the new :math:`\beta` have the same effective number of gradients as now.

    .. math::
        \frac{1 - \beta^{t'}}{1 - \beta} = \frac{1 - \beta_0^t}{1 - \beta_0} = n_t

    From there, :math:`n \leftarrow 1 + \beta n` and :math:`\hat m \leftarrow \hat m + (g - \hat m) / n` hold as for a
    constant :math:`\beta`. A smaller :math:`\beta` already bounds :math:`n`, so the step does not change.

    Args:
        beta: the new horizon.
        t: the step.
        before: the previous horizon.

    Example:
        >>> round(steps_at(0.9999, t=50_000, before=0.999))  # a mean of 1,000 gradients, not of 10,000
        1054
    """
    if beta <= before:
        return t
    n = one_minus_power(before, t) / (1 - before)
    return math.log1p(-n * (1 - beta)) / math.log(beta)


def running_mean(mean: Tensor, x: Tensor, weight: Number) -> Tensor:
    r""":math:`\beta m + (1 - \beta) x`, with the weight :math:`1 - \beta`."""
    return lerp(mean, x, weight)


def running_mean_square(mean_square: Tensor, x: Tensor, beta: Number, weight: Number) -> Tensor:
    r""":math:`\beta v + (1 - \beta) x^2`, with the weight :math:`1 - \beta`."""
    return addcmul(mean_square * beta, x, x, weight)


def update_statistics(
    g: Tensor, state: Mapping[str, Tensor], h: StatisticsScalars, mean_square: Tensor | None = None
) -> dict[str, Tensor]:
    """The statistics after one more gradient.

    Args:
        g: the raw gradient, before any weight decay; its sign does not matter.
        state: the tensors under ``MEAN``, ``MEAN_SQUARE`` and, if present, ``MEAN_ABS``.
        h: the scalars of this step.
        mean_square: the new mean square, if it is shared with the algorithm.
    """
    updated = {MEAN: running_mean(state[MEAN], g, h.weight)}
    if mean_square is None:
        updated[MEAN_SQUARE] = running_mean_square(state[MEAN_SQUARE], g, h.beta, h.weight)
    if MEAN_ABS in state:
        updated[MEAN_ABS] = running_mean(state[MEAN_ABS], torch.abs(g), h.weight)
    return updated


def moments_from(
    state: Mapping[str, Tensor],
    h: StatisticsScalars,
    measure: str | Measure,
    mean_square: Tensor | None = None,
) -> Moments:
    """The input of a measure; ``mean_square`` as in :func:`update_statistics`."""
    return Moments(
        m=state[MEAN],
        v=state[MEAN_SQUARE] if mean_square is None else mean_square,
        k=h.corrections,
        a=state[MEAN_ABS] if needs_mean_abs(measure) else None,
    )


def scale_from(
    state: Mapping[str, Tensor],
    h: StatisticsScalars,
    measure: str | Measure,
    mean_square: Tensor | None = None,
) -> Tensor:
    """The scale from the statistics; ``mean_square`` as in :func:`update_statistics`."""
    return scale_of(moments_from(state, h, measure, mean_square), h.c, measure, h.unbounded)
