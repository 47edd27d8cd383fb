r"""Statistics in, scale out: section 2 of the paper as pure functions.

Everything here is element-wise and free of state: no in-place operation, no branch on the value of
a tensor, no host synchronisation. The symbols are the paper's:

==========  =======================================================================
``m_hat``   bias-corrected running mean of the gradient, :math:`\hat m_t`
``v_hat``   bias-corrected running mean of its square, :math:`\hat v_t`
``a_hat``   bias-corrected running mean of its absolute value (relative rate only)
``n``       the number of gradients behind them, :math:`n_t`
``sigma``   standard error of the mean, :math:`\sigma_t`
``s``       conformity, :math:`s_t \in [0, 1]`
``scale``   what the update is multiplied with, :math:`\hat s_t = \min(c\,s_t, 1)`
==========  =======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["MEASURES", "Measure", "Moments", "conformity_scale", "measure_name", "resolve_measure"]

Number: TypeAlias = float | Tensor
"""A Python number, or a 0-dim tensor where reading the number would cost a synchronisation."""


class Moments(NamedTuple):
    r"""What is known about each element's past gradients, bias-corrected: a measure's only input.

    Args:
        m_hat: running mean of the gradient, :math:`\hat m_t`.
        v_hat: running mean of the squared gradient, :math:`\hat v_t`.
        n: number of gradients the means stand for, :math:`n_t = (1-\beta^t)/(1-\beta)`.
        a_hat: running mean of the absolute gradient; ``None`` unless the measure asks for it.
    """

    m_hat: Tensor
    v_hat: Tensor
    n: Number
    a_hat: Tensor | None = None


Measure: TypeAlias = Callable[[Moments, Number], Tensor]
"""``measure(moments, eps) -> s``, element-wise and within [0, 1].

A measure that sets the attribute ``needs_mean_abs = True`` on itself is handed ``a_hat`` as well.
"""


def at_least(x: Number, floor: float) -> Number:
    """The larger of a scalar and a constant, without reading the scalar if it is a tensor."""
    return x.clamp_min(floor) if isinstance(x, Tensor) else max(x, floor)


def standard_error(moments: Moments, eps: Number) -> Tensor:
    r"""Standard error of the mean gradient (Algorithm 1).

    .. math::
        \sigma_t = \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon

    The difference is exact to about ``8 * finfo.eps * v_hat`` and no better, and at :math:`t = 1` it
    is divided by :math:`\epsilon` alone: rounding noise would become a random standard error where
    exact arithmetic has zero. So that much is taken off before the clamp. Elsewhere this moves the
    scale by less than 1e-6.

    Example:
        >>> standard_error(Moments(torch.tensor(1.0), torch.tensor(5.0), 5.0), eps=0.0)
        tensor(1.0000)
    """
    m_hat, v_hat, n, _ = moments
    info = torch.finfo(m_hat.dtype)
    rounding = 8 * info.eps
    var = torch.clamp_min(v_hat * (1 - rounding) - m_hat * m_hat, 0.0)
    dof = at_least(n - 1 + eps, info.tiny)
    return torch.sqrt(var / dof) + eps


def _significance(moments: Moments, eps: Number) -> Tensor:
    r"""Distance of the mean from zero in standard errors, :math:`z_t = |\hat m_t| / \sigma_t`.

    Zero over zero is zero: an element that never saw a gradient has no sign to be sure of.
    """
    sigma = standard_error(moments, eps)
    return torch.abs(moments.m_hat) / torch.clamp_min(sigma, torch.finfo(sigma.dtype).tiny)


def normal(moments: Moments, eps: Number) -> Tensor:
    r"""Confidence in the sign of the mean if the mean is normally distributed (equations 2 and 3).

    .. math::
        s_t = 2 \left|\Phi(0; \hat m_t, \sigma_t) - \tfrac12\right|
            = \operatorname{erf}\!\left(\frac{|\hat m_t|}{\sigma_t \sqrt 2}\right)

    Example:
        >>> normal(Moments(torch.tensor(1.0), torch.tensor(5.0), 5.0), eps=1e-8)  # one sigma
        tensor(0.6827)
    """
    return torch.erf(_significance(moments, eps) * math.sqrt(0.5))


LOGISTIC_SLOPE: Final = 1.7017
"""The slope whose logistic distribution function is nearest to the normal one everywhere."""


def logistic(moments: Moments, eps: Number) -> Tensor:
    r"""The normal measure with a logistic distribution function (section 2.1).

    .. math::
        s_t = 2 \left|\frac{1}{1 + e^{k z_t}} - \tfrac12\right| = \tanh(k z_t / 2),
        \qquad z_t = |\hat m_t| / \sigma_t

    with the minimax :math:`k = 1.7017`. It differs from :func:`normal` by at most 0.019.

    Example:
        >>> logistic(Moments(torch.tensor(1.0), torch.tensor(5.0), 5.0), eps=1e-8)
        tensor(0.6915)
    """
    return torch.tanh(_significance(moments, eps) * (LOGISTIC_SLOPE / 2))


# Gauss-Legendre nodes and weights on [0, 1], twelve points: the integrand below is smooth and
# falls to e^-24 within the interval, for which twelve points leave 4e-7.
_NODES: Final = (
    0.009219682876640378,
    0.0479413718147626,
    0.11504866290284765,
    0.20634102285669126,
    0.31608425050090994,
    0.43738329574426554,
    0.5626167042557345,
    0.6839157494990901,
    0.7936589771433087,
    0.8849513370971523,
    0.9520586281852375,
    0.9907803171233596,
)
_WEIGHTS: Final = (
    0.023587668193255706,
    0.05346966299765953,
    0.08003916427167321,
    0.10158371336153287,
    0.1167462682691773,
    0.12457352290670134,
)


def student_t(moments: Moments, eps: Number) -> Tensor:
    r"""The normal measure with Student's t in place of the normal (section 2.1).

    .. math::
        s_t = 2 F_\nu(z_t) - 1
            = \frac{\int_0^{\theta} \cos^{\nu - 1} u \, du}{\int_0^{\pi/2} \cos^{\nu - 1} u \, du},
        \qquad \theta = \arctan\frac{z_t}{\sqrt \nu}, \quad \nu = \max(n_t - 1, 1)

    Both integrals are taken by the same quadrature, out to :math:`7 / \sqrt\nu` where the rest is
    below 1e-11. Against the exact function the error is below 1e-6 for :math:`\nu = 1` and
    :math:`\nu \ge 2`, and below 2e-4 between them, which is the third step alone when
    :math:`\beta` is small. One degree of freedom is the least for which the statistic exists;
    counting at least one lets the first step be taken in full, as in Algorithm 1.

    Example:
        >>> student_t(Moments(torch.tensor(1.0), torch.tensor(2.0), 2.0), eps=0.0)  # Cauchy at 1
        tensor(0.5000)
    """
    nu = at_least(moments.n - 1, 1.0)

    def integral(theta: Tensor) -> Tensor:
        total = torch.zeros_like(theta)
        for node, weight in zip(_NODES, _WEIGHTS + _WEIGHTS[::-1], strict=True):
            sine = torch.sin(theta * node)
            # cos^(nu-1) by way of the sine: near zero the cosine has no digits left to raise.
            total = total + torch.exp(torch.log1p(-sine * sine) * ((nu - 1) / 2)) * weight
        return total * theta

    theta = torch.atan(_significance(moments, eps) * nu**-0.5)
    widest = torch.clamp_max(torch.as_tensor(7 * nu**-0.5), math.pi / 2)
    return integral(torch.minimum(theta, widest)) / integral(widest)


def moment_rate(moments: Moments, eps: Number) -> Tensor:
    r"""The mean against the root mean square (section 2.4).

    .. math::
        s_t = |\hat m_t| / (\sqrt{\hat v_t} + \epsilon)

    It is hardly ever near one; the paper tunes :math:`c = 27` for it.

    Example:
        >>> moment_rate(Moments(torch.tensor(1.0), torch.tensor(4.0), 100.0), eps=0.0)
        tensor(0.5000)
    """
    rms = torch.sqrt(moments.v_hat) + eps
    return torch.abs(moments.m_hat) / torch.clamp_min(rms, torch.finfo(rms.dtype).tiny)


def relative_rate(moments: Moments, eps: Number) -> Tensor:
    r"""The mean against the mean absolute value (section 2.4).

    .. math::
        s_t = |\hat m_t| / (\hat a_t + \epsilon),
        \qquad a_t = \beta a_{t-1} + (1 - \beta) |g_t|

    Example:
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> relative_rate(Moments(one, two, 100.0, a_hat=two), eps=0.0)
        tensor(0.5000)
    """
    if moments.a_hat is None:
        raise ValueError(
            "measure 'relative_rate' needs the running mean of |g|: pass it as a_hat=..., "
            "or choose a measure that does without, such as 'normal'"
        )
    mean_abs = moments.a_hat + eps
    return torch.abs(moments.m_hat) / torch.clamp_min(mean_abs, torch.finfo(mean_abs.dtype).tiny)


relative_rate.needs_mean_abs = True  # type: ignore[attr-defined]

MEASURES: Final[dict[str, Measure]] = {
    measure.__name__: measure for measure in (normal, student_t, logistic, relative_rate, moment_rate)
}
"""The measures that have a name; any other callable of the same shape may stand in for one."""


def resolve_measure(measure: str | Measure) -> Measure:
    """The function behind a measure's name, or the callable itself.

    Example:
        >>> resolve_measure("normal") is normal
        True
    """
    if callable(measure):
        return measure
    if measure not in MEASURES:
        raise ValueError(
            f"unknown measure {measure!r}: choose one of {', '.join(map(repr, MEASURES))}, "
            "or pass a callable (moments, eps) -> s"
        )
    return MEASURES[measure]


def measure_name(measure: str | Measure) -> str:
    """A name for a measure that a checkpoint can hold, callables included.

    Example:
        >>> measure_name("normal"), measure_name(math.hypot)
        ('normal', 'math.hypot')
    """
    if isinstance(measure, str):
        return measure
    qualname = getattr(measure, "__qualname__", type(measure).__qualname__)
    return f"{getattr(measure, '__module__', None) or type(measure).__module__}.{qualname}"


def needs_mean_abs(measure: str | Measure) -> bool:
    """Whether a measure reads the running mean of the absolute gradient."""
    return bool(getattr(resolve_measure(measure), "needs_mean_abs", False))


def overconfident(s: Tensor, c: Number) -> Tensor:
    r"""Conformity times the overconfidence coefficient, at most one (equation 9).

    .. math::
        \hat s_t = \min(c \, s_t, 1)

    :math:`c = \infty` is the optimizer without CProp (section 2.3): one everywhere, also where
    :math:`s_t = 0` and the product would be undefined.

    Example:
        >>> overconfident(torch.tensor([0.0, 0.2, 0.9]), 2.0)
        tensor([0.0000, 0.4000, 1.0000])
        >>> overconfident(torch.tensor([0.0, 0.2, 0.9]), math.inf)
        tensor([1., 1., 1.])
    """
    if isinstance(c, Tensor):
        return torch.where(torch.isinf(c), torch.ones_like(s), torch.clamp_max(s * c, 1.0))
    return torch.ones_like(s) if math.isinf(c) else torch.clamp_max(s * c, 1.0)


def conformity_scale(
    m_hat: Tensor,
    v_hat: Tensor,
    n: Number,
    *,
    c: Number = 1.0,
    eps: Number = 1e-8,
    measure: str | Measure = "normal",
    a_hat: Tensor | None = None,
) -> Tensor:
    r"""The factor in [0, 1] by which CProp multiplies each element of an update (Algorithm 1).

    .. math::
        \sigma_t &= \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon \\
        \hat s_t &= \min\left(2c\,\left|\mathrm{CDF}_{\mathcal N(\hat m_t, \sigma_t)}(0)
                    - \tfrac12\right|, 1\right)

    Half-precision input is computed, and returned, in float32: :math:`\hat v_t - \hat m_t^2` has no
    digits left in less.

    Args:
        m_hat: bias-corrected running mean of the gradient.
        v_hat: bias-corrected running mean of the squared gradient.
        n: number of gradients behind the means, :math:`(1-\beta^t)/(1-\beta)`.
        c: overconfidence coefficient; larger values trade training speed for generalisation, and
            infinity switches the scaling off.
        eps: added to the standard error and to :math:`n - 1`. It is absolute: gradients whose
            standard error is below it are held back. Zero makes the scale independent of the
            gradients' size, for gradients whose float32 square neither vanishes nor overflows
            (about 1e-19 to 1e19).
        measure: ``"normal"``, ``"student_t"``, ``"logistic"``, ``"relative_rate"``,
            ``"moment_rate"``, or a callable ``(moments, eps) -> s``.
        a_hat: bias-corrected running mean of the absolute gradient, for ``"relative_rate"``.

    Returns:
        The scale, shaped like ``m_hat``.

    Example:
        >>> m_hat = torch.tensor([0.0, 1.0, 2.0])     # mean gradient of three parameters
        >>> v_hat = torch.tensor([4.0, 5.0, 4.0])     # and its mean square
        >>> conformity_scale(m_hat, v_hat, n=5.0)     # no sign, one sigma, no doubt
        tensor([0.0000, 0.6827, 1.0000])

    References:
        Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
        Conformity*, 2019, section 2 and Algorithm 1.
    """
    dtype = torch.promote_types(m_hat.dtype, torch.float32)
    moments = Moments(m_hat.to(dtype), v_hat.to(dtype), n, None if a_hat is None else a_hat.to(dtype))
    return overconfident(resolve_measure(measure)(moments, eps), c)
