"""Conformity measures: how certain the sign of the mean gradient is, from :class:`Moments` (paper, section 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from cprop.arithmetic import TINY, as_scalar, at_least
from cprop.moments import Moments

__all__ = ["MEASURES", "Measure", "is_built_in", "measure_name", "needs_mean_abs", "resolve_measure"]

Measure: TypeAlias = Callable[[Moments], Tensor]
"""``measure(moments) -> s``, element-wise and in [0, 1].

A measure with the attribute ``needs_mean_abs = True`` also receives ``a``.
"""


def normal(moments: Moments) -> Tensor:
    r"""Confidence in the sign of the mean if the mean is normally distributed (equations 2 and 3).

    .. math::
        s_t = 2 \left|\Phi(0; \hat m_t, \sigma_t) - \tfrac12\right|
            = \operatorname{erf}\!\left(\frac{|\hat m_t|}{\sigma_t \sqrt 2}\right)

    Example:
        >>> normal(Moments.of(torch.tensor(1.0), torch.tensor(5.0), n=5.0, eps=1e-8))  # one sigma
        tensor(0.6827)
    """
    return torch.erf(moments.z * math.sqrt(0.5))


LOGISTIC_SLOPE: Final = 1.7017
"""The slope with the smallest maximum difference between the logistic and the normal distribution function."""


def logistic(moments: Moments) -> Tensor:
    r"""The normal measure with a logistic distribution function (section 2.1).

    .. math::
        s_t = 2 \left|\frac{1}{1 + e^{k z_t}} - \tfrac12\right| = \tanh(k z_t / 2),
        \qquad z_t = |\hat m_t| / \sigma_t

    with the minimax :math:`k = 1.7017`. It differs from :func:`normal` by at most 0.019.

    Example:
        >>> logistic(Moments.of(torch.tensor(1.0), torch.tensor(5.0), n=5.0, eps=1e-8))
        tensor(0.6915)
    """
    return torch.tanh(moments.z * (LOGISTIC_SLOPE / 2))


# Twelve Gauss-Legendre nodes and weights on [0, 1]: the integrand below is smooth and falls to
# e^-24 within the interval, for which twelve points have an error of 4e-7.
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


def student_t(moments: Moments) -> Tensor:
    r"""The normal measure with Student's t distribution instead of the normal one (section 2.1).

    .. math::
        s_t = 2 F_\nu(z_t) - 1
            = \frac{\int_0^{\theta} \cos^{\nu - 1} u \, du}{\int_0^{\pi/2} \cos^{\nu - 1} u \, du},
        \qquad \theta = \arctan\frac{z_t}{\sqrt \nu}, \quad \nu = \max(n_t - 1, 1)

    Both integrals use the same quadrature, up to :math:`7 / \sqrt\nu`; the remainder is below 1e-11.
    The error is below 1e-6 for :math:`\nu = 1` and :math:`\nu \ge 2`, and below 2e-4 in between,
    which only happens at the third step with a small :math:`\beta`. The statistic needs at least
    one degree of freedom; using at least one also leaves the first step unscaled, as in Algorithm 1.

    Example:
        >>> student_t(Moments.of(torch.tensor(1.0), torch.tensor(2.0), n=2.0, eps=0.0))  # Cauchy at 1
        tensor(0.5000)
    """
    nu = at_least(moments.k.n - 1, 1.0)

    def integral(theta: Tensor) -> Tensor:
        total = torch.zeros_like(theta)
        for node, weight in zip(_NODES, _WEIGHTS + _WEIGHTS[::-1], strict=True):
            sine = torch.sin(theta * node)
            # cos^(nu-1) from the sine: near zero the cosine rounds to one, and its power is inaccurate.
            total = total + torch.exp(torch.log1p(-sine * sine) * ((nu - 1) / 2)) * weight
        return total * theta

    theta = torch.atan(moments.z * nu**-0.5)
    widest = torch.clamp_max(as_scalar(7 * nu**-0.5, theta.dtype), math.pi / 2)
    return integral(torch.minimum(theta, widest)) / integral(widest)


def moment_rate(moments: Moments) -> Tensor:
    r"""The mean divided by the root mean square (section 2.4).

    .. math::
        s_t = |\hat m_t| / (\sqrt{\hat v_t} + \epsilon)

    It is rarely close to one; the paper tunes :math:`c = 27` for it.

    Example:
        >>> moment_rate(Moments.of(torch.tensor(1.0), torch.tensor(4.0), n=100.0, eps=0.0))
        tensor(0.5000)
    """
    return torch.abs(moments.m_hat) / (torch.sqrt(moments.v_hat) + at_least(moments.k.eps, TINY))


def relative_rate(moments: Moments) -> Tensor:
    r"""The mean divided by the mean absolute value (section 2.4).

    .. math::
        s_t = |\hat m_t| / (\hat a_t + \epsilon),
        \qquad a_t = \beta a_{t-1} + (1 - \beta) |g_t|

    Example:
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> relative_rate(Moments.of(one, two, n=100.0, eps=0.0, a_hat=two))
        tensor(0.5000)
    """
    return torch.abs(moments.m_hat) / (moments.a_hat + at_least(moments.k.eps, TINY))


relative_rate.needs_mean_abs = True  # type: ignore[attr-defined]

MEASURES: Final[dict[str, Measure]] = {
    measure.__name__: measure for measure in (normal, student_t, logistic, relative_rate, moment_rate)
}
"""The named measures; any callable with the same signature works too."""


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
            "or pass a callable moments -> s"
        )
    return MEASURES[measure]


def measure_name(measure: str | Measure) -> str:
    """The name of a measure, callables included, as saved in a checkpoint.

    Example:
        >>> measure_name("normal"), measure_name(math.hypot)
        ('normal', 'math.hypot')
    """
    if isinstance(measure, str):
        return measure
    qualname = getattr(measure, "__qualname__", type(measure).__qualname__)
    return f"{getattr(measure, '__module__', None) or type(measure).__module__}.{qualname}"


_LAST_Z: Final = 4.05
_NORMAL: Final = (
    0.7976370388704542,
    -0.13219561612326802,
    0.01921235744928584,
    -0.0020579088566414568,
    0.0001549390901841902,
    -7.638786307129245e-06,
    2.1840751111541936e-07,
    -2.7201707385747146e-09,
)
"""The odd polynomial in z, of degree 15, that is closest to the normal measure up to ``_LAST_Z``, where it is one."""


def nearly_normal(z: Tensor) -> Tensor:
    r"""Probability that a standard normal variable is closer to zero than :math:`z \ge 0`, to within 1e-4.

    .. math::
        s(z) = \operatorname{erf}(z / \sqrt 2) \approx z\, p(z^2) \quad \text{for } z \le 4.05

    Example:
        >>> nearly_normal(torch.tensor([0.0, 1.0, 100.0]))
        tensor([0.0000, 0.6827, 1.0000])
    """
    z = torch.clamp_max(z, _LAST_Z)
    squared = z * z
    fourth = squared * squared
    # Two chains of multiply-adds side by side. Higher powers would underflow, and take long, where gradients vanish.
    even, odd = (fourth * last + before for before, last in (_NORMAL[4::2], _NORMAL[5::2]))
    for a, b in ((_NORMAL[2], _NORMAL[3]), (_NORMAL[0], _NORMAL[1])):
        even, odd = fourth * even + a, fourth * odd + b
    return z * (squared * odd + even)


def normal_for_cpu_kernels(moments: Moments) -> Tensor:
    """:func:`normal` to within 1e-4, for compiled CPU kernels.

    The statistics do not determine the scale nearly as well, and ``erf`` would take longer than the rest of the step.
    """
    return nearly_normal(moments.z)


def for_cpu_kernels(measure: str | Measure) -> str | Measure:
    """The form of a measure in a compiled float32 CPU kernel."""
    return normal_for_cpu_kernels if resolve_measure(measure) is normal else measure


def needs_mean_abs(measure: str | Measure) -> bool:
    """Whether a measure reads the running mean of the absolute gradient."""
    return bool(getattr(resolve_measure(measure), "needs_mean_abs", False))


def is_built_in(measure: str | Measure) -> bool:
    """Whether a measure is one of :data:`MEASURES`."""
    function = resolve_measure(measure)
    return any(function is known for known in MEASURES.values())
