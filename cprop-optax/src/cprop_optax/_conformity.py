r"""From statistics to the scale: section 2 of the paper as pure functions of arrays.

Everything here is element-wise: no reductions over elements, no branches on values. So the functions
can be vectorized, differentiated and sharded without communication. The symbols are the paper's:

=========  =============================================================================
``m_hat``  mean of the past gradients, :math:`\hat m_t`
``v_hat``  mean of their squares, :math:`\hat v_t`
``a_hat``  mean of their absolute values, :math:`\hat a_t` (relative rate only)
``n``      the effective number of gradients in these means, :math:`n_t`
``sigma``  standard error of the mean, :math:`\sigma_t`
``z``      the mean divided by its standard error, :math:`z_t = |\hat m_t| / \sigma_t`
``s``      conformity, :math:`s_t \in [0, 1]`
``scale``  the factor on the update, :math:`\hat s_t = \min(c\,s_t, 1)`
=========  =============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


class Moments(NamedTuple):
    r"""Statistics of each element's past gradients: the only input of a measure.

    Attributes:
      m_hat: mean of the gradients.
      v_hat: mean of their squares.
      n: effective number of gradients in the means, a scalar.
      eps: the :math:`\epsilon` of Algorithm 1, a scalar.
      a_hat: mean of the absolute gradients; ``None`` unless the measure needs it.
    """

    m_hat: jax.Array
    v_hat: jax.Array
    n: jax.Array
    eps: jax.Array
    a_hat: jax.Array | None = None

    @property
    def sigma(self) -> jax.Array:
        r"""Standard error of the mean (Algorithm 1).

        .. math::
          \sigma_t = \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon

        One gradient has no variance, but the difference may contain rounding noise, which the formula would
        divide by :math:`\epsilon` at :math:`n_t = 1`. So it is set to zero there, and the first step is not scaled,
        as in exact arithmetic.
        """
        per_item = jnp.where(self.n > 1, 1 / jnp.maximum(self.n - 1 + self.eps, _tiny(self.n)), 0)
        return jnp.sqrt(jnp.maximum(self.v_hat - jnp.square(self.m_hat), 0) * per_item) + self.eps

    @property
    def z(self) -> jax.Array:
        r"""Distance of the mean from zero in standard errors, :math:`|\hat m_t| / \sigma_t`.

        Zero divided by zero is zero: an element without gradients has no known sign.
        """
        return jnp.abs(self.m_hat) / _not_zero(self.sigma)


Measure: TypeAlias = Callable[[Moments], jax.Array]
"""``measure(moments) -> s``, element-wise and in [0, 1].

A measure with the attribute ``needs_mean_abs = True`` also receives ``a_hat``.
"""


def _tiny(x: jax.Array) -> float:
    return float(jnp.finfo(x.dtype).tiny)  # type: ignore[no-untyped-call]


def _not_zero(x: jax.Array) -> jax.Array:
    """Clamp a denominator to at least the smallest normal number, for ``eps = 0``."""
    return jnp.maximum(x, _tiny(x))


def normal(moments: Moments) -> jax.Array:
    r"""Confidence in the sign of the mean if the mean is normally distributed (equations 2 and 3).

    .. math::
      s_t = 2 \left|\Phi(0; \hat m_t, \sigma_t) - \tfrac12\right|
          = \operatorname{erf}\!\left(z_t / \sqrt 2\right)
    """
    return jax.lax.erf(moments.z * math.sqrt(0.5))


LOGISTIC_SLOPE: Final = 1.7017
"""The slope with the smallest maximum difference between the logistic and the normal distribution function."""


def logistic(moments: Moments) -> jax.Array:
    r"""The normal measure with a logistic distribution function (section 2.1).

    .. math::
      s_t = 2 \left|\frac{1}{1 + e^{k z_t}} - \tfrac12\right| = \tanh(k z_t / 2), \qquad k = 1.7017

    It differs from the normal measure by at most 0.019.
    """
    return jnp.tanh(moments.z * (LOGISTIC_SLOPE / 2))


# Gauss-Legendre on [0, 1] in x, with u = 1 - (1 - x)^2: the substitution removes the integrand's
# square-root singularity at the upper end for 1 < nu < 2.
_X, _W = np.polynomial.legendre.leggauss(16)
_NODES: Final = [1 - ((1 - x) / 2) ** 2 for x in _X.tolist()]
_WEIGHTS: Final = [w * (1 - x) / 2 for x, w in zip(_X.tolist(), _W.tolist(), strict=True)]


def student_t(moments: Moments) -> jax.Array:
    r"""The normal measure with Student's t distribution instead of the normal one (section 2.1).

    .. math::
      s_t = 2 F_\nu(z_t) - 1
          = \frac{\int_0^\theta \cos^{\nu - 1} u \, du}{\int_0^{\pi / 2} \cos^{\nu - 1} u \, du},
      \qquad \theta = \arctan\frac{z_t}{\sqrt\nu}, \quad \nu = \max(n_t - 1, 1)

    Computed by quadrature, with an error below 1e-6. ``betainc`` would be exact, but it loops until
    the last element has converged, which needs communication between devices under sharding.
    """
    nu = jnp.maximum(moments.n - 1, 1)
    below_one = 1 - float(jnp.finfo(nu.dtype).eps)  # type: ignore[no-untyped-call]

    def integral(theta: jax.Array) -> jax.Array:
        total = jnp.zeros_like(theta)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            # cos^(nu - 1) from the sine: near zero the cosine rounds to one, and its power is inaccurate. The sine
            # stays below one, because zero to the power of zero must be one.
            sine_squared = jnp.minimum(jnp.square(jnp.sin(theta * node)), below_one)
            total += weight * jnp.exp(jnp.log1p(-sine_squared) * ((nu - 1) / 2))
        return total * theta

    widest = jnp.minimum(7 / jnp.sqrt(nu), math.pi / 2)  # beyond seven sigma the remainder is below 1e-11
    theta = jnp.arctan(moments.z / jnp.sqrt(nu))
    return integral(jnp.minimum(theta, widest)) / integral(widest)


def moment_rate(moments: Moments) -> jax.Array:
    r"""The mean divided by the root mean square (section 2.4).

    .. math::
      s_t = |\hat m_t| / (\sqrt{\hat v_t} + \epsilon)

    It is rarely close to one; the paper tunes :math:`c = 27` for it.
    """
    return jnp.abs(moments.m_hat) / _not_zero(jnp.sqrt(moments.v_hat) + moments.eps)


def relative_rate(moments: Moments) -> jax.Array:
    r"""The mean divided by the mean absolute value (section 2.4).

    .. math::
      s_t = |\hat m_t| / (\hat a_t + \epsilon)
    """
    if moments.a_hat is None:
        raise ValueError(
            "measure 'relative_rate' needs the mean of |g|: pass a_hat=..., initialize the state with this measure, "
            "or choose a measure that does not need it, such as 'normal'"
        )
    return jnp.abs(moments.m_hat) / _not_zero(moments.a_hat + moments.eps)


relative_rate.needs_mean_abs = True  # type: ignore[attr-defined]

MEASURES: Final[dict[str, Measure]] = {
    measure.__name__: measure for measure in (normal, student_t, logistic, moment_rate, relative_rate)
}
"""The named measures; any function of :class:`Moments` works too."""


def resolve_measure(measure: str | Measure) -> Measure:
    """The function behind a measure's name, or the function itself."""
    if callable(measure):
        return measure
    if measure not in MEASURES:
        raise ValueError(
            f"unknown measure {measure!r}: choose one of {', '.join(map(repr, MEASURES))}, "
            "or pass a function moments -> s"
        )
    return MEASURES[measure]


def needs_mean_abs(measure: str | Measure) -> bool:
    """Whether a measure reads the mean of the absolute gradients."""
    return bool(getattr(resolve_measure(measure), "needs_mean_abs", False))


def arithmetic_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype to compute in: float64 for float64, else float32. Half precision is only used for storage."""
    return jnp.promote_types(dtype, jnp.float32)


def conformity_scale(
    m_hat: jax.typing.ArrayLike,
    v_hat: jax.typing.ArrayLike,
    n: jax.typing.ArrayLike,
    *,
    c: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 0.0,
    measure: str | Measure = "normal",
    a_hat: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    r"""The factor in [0, 1] by which CProp multiplies each element of an update (Algorithm 1).

    .. math::

      \begin{align*}
        \sigma_t &= \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon \\
        \hat s_t &= \min\left(2c\,\left|\mathrm{CDF}_{\mathcal N(\hat m_t, \sigma_t)}(0) - \tfrac12\right|, 1\right)
      \end{align*}

    Half-precision input is computed and returned in float32, because :math:`\hat v_t - \hat m_t^2`
    needs the digits.

    Args:
      m_hat: bias-corrected mean of the past gradients.
      v_hat: bias-corrected mean of their squares.
      n: effective number of gradients in the means, :math:`(1-\beta^t)/(1-\beta)`.
      c: overconfidence coefficient (equation 9); infinity gives a scale of one everywhere.
      eps: added to the standard error and to :math:`n - 1`. Zero makes the scale independent of the
        gradients' magnitude, if their squares neither underflow nor overflow. The paper's 1e-8 is
        absolute: it slows down elements whose standard error is smaller.
      measure: ``"normal"``, ``"student_t"``, ``"logistic"``, ``"moment_rate"``,
        ``"relative_rate"``, or a function ``moments -> s`` of :class:`cprop_optax.Moments`.
      a_hat: bias-corrected mean of the absolute gradients, for ``"relative_rate"``.

    Returns:
      The scale, with the shape of ``m_hat``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import cprop_optax
      >>> m_hat = jnp.array([0.0, 1.0, 2.0])  # mean gradient of three parameters
      >>> v_hat = jnp.array([4.0, 5.0, 4.0])  # and its mean square
      >>> scale = cprop_optax.conformity_scale(m_hat, v_hat, n=5.0)  # sign unknown, one sigma, certain
      >>> print(scale.round(4))
      [0.     0.6827 1.    ]

    References:
      Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
      Conformity*, 2019, section 2 and Algorithm 1
    """
    m_hat = jnp.asarray(m_hat)
    dtype = arithmetic_dtype(m_hat.dtype)

    def convert(x: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(x, dtype)

    moments = Moments(
        m_hat=convert(m_hat),
        v_hat=convert(v_hat),
        n=convert(n),
        eps=convert(eps),
        a_hat=None if a_hat is None else convert(a_hat),
    )
    s = resolve_measure(measure)(moments)
    # c = infinity gives the optimizer without CProp (section 2.3), even if s = 0 and c s is NaN.
    return jnp.where(jnp.isinf(convert(c)), 1, jnp.minimum(convert(c) * s, 1))
