r"""From statistics to the scale: section 2 of the paper as pure functions.

Everything here is element-wise and stateless: no in-place operations, no branches on tensor values,
no host synchronization. The symbols are the paper's:

==========  =======================================================================
``m_hat``   bias-corrected running mean of the gradient, :math:`\hat m_t`
``v_hat``   bias-corrected running mean of its square, :math:`\hat v_t`
``a_hat``   bias-corrected running mean of its absolute value (relative rate only)
``z``       the mean divided by its standard error, :math:`z_t = |\hat m_t| / \sigma_t`
``n``       the effective number of gradients in these means, :math:`n_t`
``sigma``   standard error of the mean, :math:`\sigma_t`
``s``       conformity, :math:`s_t \in [0, 1]`
``scale``   the factor on the update, :math:`\hat s_t = \min(c\,s_t, 1)`
==========  =======================================================================
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.measures import Measure, resolve_measure
from cprop.moments import Moments

__all__ = ["conformity_scale", "finite", "overconfident", "scale_of"]


def overconfident(s: Tensor, c: Number, unbounded: bool = True) -> Tensor:
    r"""Conformity times the overconfidence coefficient, at most one (equation 9).

    .. math::
        \hat s_t = \min(c \, s_t, 1)

    :math:`c = \infty` gives the optimizer without CProp (section 2.3): a scale of one everywhere,
    even if :math:`s_t = 0` and the product is undefined.

    Args:
        s: the conformity.
        c: the coefficient.
        unbounded: whether a ``c`` that is a tensor may be infinite; a kernel is a tenth faster without the case.

    Example:
        >>> overconfident(torch.tensor([0.0, 0.2, 0.9]), 2.0)
        tensor([0.0000, 0.4000, 1.0000])
        >>> overconfident(torch.tensor([0.0, 0.2, 0.9]), math.inf)
        tensor([1., 1., 1.])
    """
    if not isinstance(c, Tensor) and math.isinf(c):
        return torch.ones_like(s)
    infinite = torch.isinf(c) if isinstance(c, Tensor) and unbounded else None
    c = finite(c) if infinite is not None or not isinstance(c, Tensor) else c
    scale = torch.clamp_max(s if isinstance(c, float) and c == 1.0 else s * c, 1.0)
    return scale if infinite is None else torch.where(infinite, torch.ones_like(s), scale)


def finite(c: Number) -> Number:
    """The coefficient, or the largest number in float32: zero times infinity is NaN."""
    largest = torch.finfo(torch.float32).max
    return torch.clamp_max(c, largest) if isinstance(c, Tensor) else min(c, largest)


def conformity_scale(
    m_hat: Tensor,
    v_hat: Tensor,
    n: Number,
    *,
    c: Number = 1.0,
    eps: Number = 0.0,
    measure: str | Measure = "normal",
    a_hat: Tensor | None = None,
) -> Tensor:
    r"""The factor in [0, 1] by which CProp multiplies each element of an update (Algorithm 1).

    .. math::
        \sigma_t &= \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon \\
        \hat s_t &= \min\left(2c\,\left|\mathrm{CDF}_{\mathcal N(\hat m_t, \sigma_t)}(0)
                    - \tfrac12\right|, 1\right)

    Half-precision input is computed and returned in float32, because :math:`\hat v_t - \hat m_t^2`
    needs the digits.

    Args:
        m_hat: bias-corrected running mean of the gradient.
        v_hat: bias-corrected running mean of the squared gradient.
        n: effective number of gradients in the means, :math:`(1-\beta^t)/(1-\beta)`.
        c: overconfidence coefficient; larger values trade training speed for generalization, and
            infinity disables the scaling.
        eps: added to the standard error and to :math:`n - 1`. Zero makes the scale independent of the
            gradients' magnitude, if their float32 squares neither underflow nor overflow (about 1e-19 to
            1e19). The paper's 1e-8 is absolute: it slows down elements whose standard error is smaller.
        measure: ``"normal"``, ``"student_t"``, ``"logistic"``, ``"relative_rate"``,
            ``"moment_rate"``, or a callable ``moments -> s`` of :class:`Moments`.
        a_hat: bias-corrected running mean of the absolute gradient, for ``"relative_rate"``.

    Returns:
        The scale, with the shape of ``m_hat``.

    Example:
        >>> m_hat = torch.tensor([0.0, 1.0, 2.0])     # mean gradient of three parameters
        >>> v_hat = torch.tensor([4.0, 5.0, 4.0])     # and its mean square
        >>> conformity_scale(m_hat, v_hat, n=5.0)     # sign unknown, one sigma, certain
        tensor([0.0000, 0.6827, 1.0000])

    References:
        Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
        Conformity*, 2019, section 2 and Algorithm 1.
    """
    dtype = torch.promote_types(m_hat.dtype, torch.float32)
    moments = Moments.of(m_hat.to(dtype), v_hat.to(dtype), n, eps, None if a_hat is None else a_hat.to(dtype))
    return scale_of(moments, c, measure)


def scale_of(moments: Moments, c: Number, measure: str | Measure, unbounded: bool = True) -> Tensor:
    """The scale for a measure."""
    return overconfident(resolve_measure(measure)(moments), c, unbounded)
