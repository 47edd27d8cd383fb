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
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cprop.arithmetic import Factor, Number, Quotient, addcmul, as_scalar, divided, normal_as_quotient

__all__ = ["MEASURES", "Measure", "Moments", "conformity_scale", "measure_name", "resolve_measure"]


TINY: Final = torch.finfo(torch.float32).tiny
"""Added to denominators that might be zero; negligible next to any other value."""


class Corrections(NamedTuple):
    r"""The scalars that turn running averages into statistics, computed once per step for all elements.

    Args:
        n: effective number of gradients in the averages, :math:`n_t = (1-\beta^t)/(1-\beta)`.
        eps: the :math:`\epsilon` of Algorithm 1.
        b: bias correction of the mean, :math:`1 - \beta^t`.
        b_v: bias correction of the mean square.
        k_m: :math:`1 / (n_t - 1 + \epsilon)`; zero if :math:`n_t = 1`, since one gradient has no variance.
        k_v: :math:`k_m b^2 / b_v`.
        k_eps: :math:`b\,\epsilon`, never zero.
    """

    n: Number
    eps: Number
    b: Number
    b_v: Number
    k_m: Number
    k_v: Number
    k_eps: Number

    @classmethod
    def of(cls, n: Number, eps: Number, b: Number = 1.0, b_v: Number = 1.0) -> Corrections:
        """Compute all scalars from the four independent ones."""
        # n - 1 is zero at t = 1 and at least beta afterwards. At t = 1 Algorithm 1 divides a variance of zero by
        # epsilon. Stored averages are rounded, so their variance may not be zero, and 1 / epsilon would amplify it.
        k_m = 1 / at_least(n - 1 + eps, 1e-8)
        k_m = torch.where(n > 1, k_m, 0.0) if isinstance(n, Tensor) else k_m if n > 1 else 0.0
        return cls(n, eps, b, b_v, k_m, k_m * b * b / b_v, at_least(eps * b, TINY))


class Moments(NamedTuple):
    r"""Statistics of each element's past gradients: the only input of a measure.

    The averages are stored uncorrected, together with their bias corrections, so that a measure
    computes only what it reads. Use :meth:`of` to build one from bias-corrected averages.

    Args:
        m: running mean of the gradient.
        v: running mean of the squared gradient.
        k: the scalars of this step.
        a: running mean of the absolute gradient; ``None`` unless the measure needs it.
    """

    m: Tensor
    v: Tensor
    k: Corrections
    a: Tensor | None = None

    @classmethod
    def of(cls, m_hat: Tensor, v_hat: Tensor, n: Number, eps: Number, a_hat: Tensor | None = None) -> Moments:
        """Build from bias-corrected averages."""
        return cls(m_hat, v_hat, Corrections.of(n, eps), a_hat)

    @property
    def m_hat(self) -> Tensor:
        r"""Bias-corrected mean, :math:`\hat m_t`."""
        return self.m / self.k.b

    @property
    def v_hat(self) -> Tensor:
        r"""Bias-corrected mean square, :math:`\hat v_t`."""
        return self.v / self.k.b_v

    @property
    def a_hat(self) -> Tensor:
        r"""Bias-corrected mean absolute value, :math:`\hat a_t`."""
        if self.a is None:
            raise ValueError(
                "this measure needs the running mean of |g|: pass it as a_hat=..., or choose a measure that does "
                "not need it, such as 'normal'"
            )
        return self.a / self.k.b

    @property
    def z(self) -> Tensor:
        r"""Distance of the mean from zero in standard errors, :math:`|\hat m_t| / \sigma_t` (Algorithm 1).

        .. math::
            \sigma_t = \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon

        Both sides of the quotient are multiplied by the bias correction :math:`b` of the mean, which
        avoids dividing every element by a scalar:

        .. math::
            z_t = \frac{|m_t|}{\sqrt{\max(k_v v_t - k_m m_t^2, 0)} + b\,\epsilon}, \qquad
            k_m = \frac{1}{n_t - 1 + \epsilon}, \quad k_v = k_m b^2 / b_v

        At :math:`t = 1` both are zero: one gradient has no variance, so the first step is not scaled.
        The difference is accurate to about ``8 * finfo.eps * v``. If all gradients are equal, the exact standard error
        is zero, but rounding noise would make it positive; :math:`k_v` is therefore reduced by that relative amount.
        Otherwise this changes the scale by less than 1e-6. Zero divided by zero is zero: an element that has
        never seen a gradient has no known sign.

        Example:
            >>> Moments.of(torch.tensor(2.0), torch.tensor(8.0), n=5.0, eps=0.0).z
            tensor(2.0000)
        """
        rounding = 8 * torch.finfo(self.m.dtype).eps
        variance = torch.relu(addcmul(self.v * (self.k.k_v * (1 - rounding)), self.m, self.m, -self.k.k_m))
        return torch.abs(self.m) / (torch.sqrt(variance) + self.k.k_eps)


Measure: TypeAlias = Callable[[Moments], Factor]
"""``measure(moments) -> s``, element-wise and in [0, 1]: a tensor, or a quotient of two.

A measure with the attribute ``needs_mean_abs = True`` also receives ``a``.
"""


def at_least(x: Number, floor: float) -> Number:
    """The larger of a scalar and a constant, without a host synchronization if the scalar is a tensor."""
    return x.clamp_min(floor) if isinstance(x, Tensor) else max(x, floor)


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


def normal_for_cpu_kernels(moments: Moments) -> Quotient:
    """:func:`normal` to within 1e-6, for compiled CPU kernels: ``erf`` would take longer than the rest of the step."""
    return normal_as_quotient(moments.z)


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


def for_cpu_kernels(measure: str | Measure) -> str | Measure:
    """The measure that a compiled float32 CPU kernel uses instead of the given one."""
    return normal_for_cpu_kernels if resolve_measure(measure) is normal else measure


def needs_mean_abs(measure: str | Measure) -> bool:
    """Whether a measure reads the running mean of the absolute gradient."""
    return bool(getattr(resolve_measure(measure), "needs_mean_abs", False))


def overconfident(s: Factor, c: Number, unbounded: bool = True) -> Factor:
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
        return torch.ones_like(s.numerator if isinstance(s, Quotient) else s)
    infinite = torch.isinf(c) if isinstance(c, Tensor) and unbounded else None
    c = finite(c) if infinite is not None or not isinstance(c, Tensor) else c
    if isinstance(s, Quotient):
        limit = s.denominator if infinite is None else torch.where(infinite, 0.0, s.denominator)
        # relu instead of minimum(), which takes three instructions because it propagates NaN.
        excess = torch.relu(limit - s.numerator * c)
        return Quotient(s.denominator - excess, s.denominator)
    scale = torch.clamp_max(s * c, 1.0)
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
    eps: Number = 1e-8,
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
        eps: added to the standard error and to :math:`n - 1`. It is absolute: it slows down elements
            whose standard error is smaller. Zero makes the scale independent of the gradients'
            magnitude, if their float32 squares neither underflow nor overflow (about 1e-19 to 1e19).
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
    return divided(scale_of(moments, c, measure))


def scale_of(moments: Moments, c: Number, measure: str | Measure, unbounded: bool = True) -> Factor:
    """The scale for a measure."""
    return overconfident(resolve_measure(measure)(moments), c, unbounded)
