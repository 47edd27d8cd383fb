r"""Statistics in, scale out: section 2 of the paper as pure functions.

Everything here is element-wise and free of state: no in-place operation, no branch on the value of
a tensor, no host synchronisation. The symbols are the paper's:

==========  =======================================================================
``m_hat``   bias-corrected running mean of the gradient, :math:`\hat m_t`
``v_hat``   bias-corrected running mean of its square, :math:`\hat v_t`
``a_hat``   bias-corrected running mean of its absolute value (relative rate only)
``z``       the mean over its standard error, :math:`z_t = |\hat m_t| / \sigma_t`
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

from cprop.arithmetic import Factor, Number, Quotient, addcmul, as_scalar, divided, normal_as_quotient

__all__ = ["MEASURES", "Measure", "Moments", "conformity_scale", "measure_name", "resolve_measure"]


TINY: Final = torch.finfo(torch.float32).tiny
"""Added where a denominator might be zero: it vanishes beside anything else."""


class Corrections(NamedTuple):
    r"""The scalars that turn running averages into statistics, computed once a step for all elements.

    Args:
        n: number of gradients the averages stand for, :math:`n_t = (1-\beta^t)/(1-\beta)`.
        eps: the :math:`\epsilon` of Algorithm 1.
        b: bias correction of the mean, :math:`1 - \beta^t`.
        b_v: bias correction of the mean square.
        k_m: :math:`1 / (n_t - 1 + \epsilon)`, and zero where :math:`n_t = 1`: one gradient has no variance.
        k_v: :math:`k_m b^2 / b_v`.
        k_eps: :math:`b\,\epsilon`, and never zero.
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
        """All of them, from the four that are independent."""
        # n - 1 is zero at t = 1, and at least beta after it. There Algorithm 1 divides a variance of zero by epsilon;
        # of what was rounded when it was stored, the difference is not zero, and 1e8 times that would be the scale.
        k_m = 1 / at_least(n - 1 + eps, 1e-8)
        k_m = torch.where(n > 1, k_m, 0.0) if isinstance(n, Tensor) else k_m if n > 1 else 0.0
        return cls(n, eps, b, b_v, k_m, k_m * b * b / b_v, at_least(eps * b, TINY))


class Moments(NamedTuple):
    r"""What is known about each element's past gradients: a measure's only input.

    The averages are kept as they run, with what corrects their bias beside them, so that a measure
    pays only for what it reads. :meth:`of` makes one from corrected averages.

    Args:
        m: running mean of the gradient.
        v: running mean of the squared gradient.
        k: the scalars of this step.
        a: running mean of the absolute gradient; ``None`` unless the measure asks for it.
    """

    m: Tensor
    v: Tensor
    k: Corrections
    a: Tensor | None = None

    @classmethod
    def of(cls, m_hat: Tensor, v_hat: Tensor, n: Number, eps: Number, a_hat: Tensor | None = None) -> Moments:
        """From averages whose bias is corrected already."""
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
                "without, such as 'normal'"
            )
        return self.a / self.k.b

    @property
    def z(self) -> Tensor:
        r"""Distance of the mean from zero in standard errors, :math:`|\hat m_t| / \sigma_t` (Algorithm 1).

        .. math::
            \sigma_t = \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon

        Both sides of the quotient are multiplied with the bias correction :math:`b` of the mean, so
        that no element is divided by a scalar:

        .. math::
            z_t = \frac{|m_t|}{\sqrt{\max(k_v v_t - k_m m_t^2, 0)} + b\,\epsilon}, \qquad
            k_m = \frac{1}{n_t - 1 + \epsilon}, \quad k_v = k_m b^2 / b_v

        At :math:`t = 1` both are zero: one gradient has no variance, and every element takes its first step in full.
        The difference is exact to about ``8 * finfo.eps * v`` and no better: where gradients are all alike, rounding
        noise would become a standard error where exact arithmetic has zero. So that much is taken off :math:`k_v`.
        Elsewhere this moves the scale by less than 1e-6. Zero over zero is zero: an element that never saw a
        gradient has no sign to be sure of.

        Example:
            >>> Moments.of(torch.tensor(2.0), torch.tensor(8.0), n=5.0, eps=0.0).z
            tensor(2.0000)
        """
        rounding = 8 * torch.finfo(self.m.dtype).eps
        variance = torch.relu(addcmul(self.v * (self.k.k_v * (1 - rounding)), self.m, self.m, -self.k.k_m))
        return torch.abs(self.m) / (torch.sqrt(variance) + self.k.k_eps)


Measure: TypeAlias = Callable[[Moments], Factor]
"""``measure(moments) -> s``, element-wise and within [0, 1]; a tensor, or a quotient of two.

A measure that sets the attribute ``needs_mean_abs = True`` on itself is handed ``a`` as well.
"""


def at_least(x: Number, floor: float) -> Number:
    """The larger of a scalar and a constant, without reading the scalar if it is a tensor."""
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
    """:func:`normal` within 1e-6, for compiled kernels on a CPU: there ``erf`` takes longer than the rest of a step."""
    return normal_as_quotient(moments.z)


LOGISTIC_SLOPE: Final = 1.7017
"""The slope whose logistic distribution function is nearest to the normal one everywhere."""


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


def student_t(moments: Moments) -> Tensor:
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
        >>> student_t(Moments.of(torch.tensor(1.0), torch.tensor(2.0), n=2.0, eps=0.0))  # Cauchy at 1
        tensor(0.5000)
    """
    nu = at_least(moments.k.n - 1, 1.0)

    def integral(theta: Tensor) -> Tensor:
        total = torch.zeros_like(theta)
        for node, weight in zip(_NODES, _WEIGHTS + _WEIGHTS[::-1], strict=True):
            sine = torch.sin(theta * node)
            # cos^(nu-1) by way of the sine: near zero the cosine has no digits left to raise.
            total = total + torch.exp(torch.log1p(-sine * sine) * ((nu - 1) / 2)) * weight
        return total * theta

    theta = torch.atan(moments.z * nu**-0.5)
    widest = torch.clamp_max(as_scalar(7 * nu**-0.5, theta.dtype), math.pi / 2)
    return integral(torch.minimum(theta, widest)) / integral(widest)


def moment_rate(moments: Moments) -> Tensor:
    r"""The mean against the root mean square (section 2.4).

    .. math::
        s_t = |\hat m_t| / (\sqrt{\hat v_t} + \epsilon)

    It is hardly ever near one; the paper tunes :math:`c = 27` for it.

    Example:
        >>> moment_rate(Moments.of(torch.tensor(1.0), torch.tensor(4.0), n=100.0, eps=0.0))
        tensor(0.5000)
    """
    return torch.abs(moments.m_hat) / (torch.sqrt(moments.v_hat) + at_least(moments.k.eps, TINY))


def relative_rate(moments: Moments) -> Tensor:
    r"""The mean against the mean absolute value (section 2.4).

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
            "or pass a callable moments -> s"
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


def for_cpu_kernels(measure: str | Measure) -> str | Measure:
    """The measure that a compiled float32 kernel for a CPU computes in place of one."""
    return normal_for_cpu_kernels if resolve_measure(measure) is normal else measure


def needs_mean_abs(measure: str | Measure) -> bool:
    """Whether a measure reads the running mean of the absolute gradient."""
    return bool(getattr(resolve_measure(measure), "needs_mean_abs", False))


def overconfident(s: Factor, c: Number, unbounded: bool = True) -> Factor:
    r"""Conformity times the overconfidence coefficient, at most one (equation 9).

    .. math::
        \hat s_t = \min(c \, s_t, 1)

    :math:`c = \infty` is the optimizer without CProp (section 2.3): one everywhere, also where
    :math:`s_t = 0` and the product would be undefined.

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
        # The smaller of two, by relu: minimum() takes three instructions, for the sake of NaN.
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
            ``"moment_rate"``, or a callable ``moments -> s`` of :class:`Moments`.
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
    moments = Moments.of(m_hat.to(dtype), v_hat.to(dtype), n, eps, None if a_hat is None else a_hat.to(dtype))
    return divided(scale_of(moments, c, measure))


def scale_of(moments: Moments, c: Number, measure: str | Measure, unbounded: bool = True) -> Factor:
    """The scale that a measure gives."""
    return overconfident(resolve_measure(measure)(moments), c, unbounded)
