r"""The running mean and mean square of each element's gradient, and the scale they give.

.. math::
    m_t &= \beta m_{t-1} + (1 - \beta) g_t   & \hat m_t &= m_t / (1 - \beta^t) \\
    v_t &= \beta v_{t-1} + (1 - \beta) g_t^2 & \hat v_t &= v_t / (1 - \beta^t)

The state of one parameter is a dictionary under the keys below, all prefixed ``cprop_`` so that
they can lie beside an inner optimizer's own in one ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import addcmul, lerp, one_minus_power
from cprop.conformity import Measure, Number, conformity_scale, needs_mean_abs

__all__ = ["MEAN", "MEAN_ABS", "MEAN_SQUARE", "PREFIX", "STEP", "StatisticsScalars"]

PREFIX: Final = "cprop_"
STEP: Final = "cprop_step"
"""How many gradients this parameter has seen: one counter a parameter, never one an optimizer."""
MEAN: Final = "cprop_m"
MEAN_SQUARE: Final = "cprop_v"
MEAN_ABS: Final = "cprop_a"


class StatisticsScalars(NamedTuple):
    """The numbers one step of the statistics needs, computed once for all elements."""

    beta: Number
    bias_correction: Number
    square_bias_correction: Number
    """Of the mean square; it has seen more gradients than the mean after a warm start with Adam's."""
    n: Number
    c: Number
    eps: Number


def statistics_scalars(group: Mapping[str, Any], t: Number, square_t: Number | None = None) -> StatisticsScalars:
    r"""The scalars of a parameter group at a parameter's step ``t``.

    .. math::
        n_t = \frac{1 - \beta^t}{1 - \beta} = 1 + \frac{\beta (1 - \beta^{t-1})}{1 - \beta}

    The second form is exactly one at :math:`t = 1`, whatever the precision.

    Args:
        group: a param group, with ``cprop_beta``, ``cprop_c`` and ``cprop_eps``.
        t: gradients seen by the mean.
        square_t: gradients seen by the mean square, where that is Adam's; ``t`` if not given.
    """
    beta = group["cprop_beta"]
    return StatisticsScalars(
        beta=beta,
        bias_correction=one_minus_power(beta, t),
        square_bias_correction=one_minus_power(beta, t if square_t is None else square_t),
        n=1 + beta * one_minus_power(beta, t - 1) / (1 - beta),
        c=group["cprop_c"],
        eps=group["cprop_eps"],
    )


def running_mean(mean: Tensor, x: Tensor, beta: Number) -> Tensor:
    r""":math:`\beta m + (1 - \beta) x`."""
    return lerp(mean, x, 1 - beta)


def running_mean_square(mean_square: Tensor, x: Tensor, beta: Number) -> Tensor:
    r""":math:`\beta v + (1 - \beta) x^2`."""
    return addcmul(mean_square * beta, x, x, 1 - beta)


def observe(
    g: Tensor, state: Mapping[str, Tensor], h: StatisticsScalars, mean_square: Tensor | None = None
) -> dict[str, Tensor]:
    """The statistics after one more gradient.

    Args:
        g: the raw gradient: before any weight decay, in either sign.
        state: the tensors under ``MEAN``, ``MEAN_SQUARE`` and, if kept, ``MEAN_ABS``.
        h: the scalars of this step.
        mean_square: the new mean square if another algorithm keeps the same one.
    """
    seen = {MEAN: running_mean(state[MEAN], g, h.beta)}
    if mean_square is None:
        seen[MEAN_SQUARE] = running_mean_square(state[MEAN_SQUARE], g, h.beta)
    if MEAN_ABS in state:
        seen[MEAN_ABS] = running_mean(state[MEAN_ABS], torch.abs(g), h.beta)
    return seen


def scale_of(
    state: Mapping[str, Tensor],
    h: StatisticsScalars,
    measure: str | Measure,
    mean_square: Tensor | None = None,
) -> Tensor:
    """The scale that the statistics give; ``mean_square`` as in :func:`observe`."""
    return conformity_scale(
        m_hat=state[MEAN] / h.bias_correction,
        v_hat=(state[MEAN_SQUARE] if mean_square is None else mean_square) / h.square_bias_correction,
        n=h.n,
        c=h.c,
        eps=h.eps,
        measure=measure,
        a_hat=state[MEAN_ABS] / h.bias_correction if needs_mean_abs(measure) else None,
    )
