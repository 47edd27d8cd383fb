r"""The running statistics of the gradients: their state, and their update.

The state contains bias-corrected means, computed directly by these recurrences:

.. math::

  \begin{align*}
    n_t &= 1 + \beta n_{t-1} = (1 - \beta^t) / (1 - \beta) \\
    \hat m_t &= \hat m_{t-1} + (g_t - \hat m_{t-1}) / n_t
              = \big(\beta m_{t-1} + (1 - \beta) g_t\big) / (1 - \beta^t)
  \end{align*}

They equal the paper's formulas. They need no division of each element by :math:`1 - \beta^t`, are exact
at the first step, and remain weighted means if :math:`\beta` changes in mid-training.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cprop_optax._conformity import Measure, arithmetic_dtype, conformity_scale, needs_mean_abs, resolve_measure
from cprop_optax._storage import check_moment_dtype, store

State = TypeVar("State")


class ConformityState(NamedTuple):
    """Statistics of the past gradients: CProp's whole state.

    Attributes:
      count: number of steps.
      n: effective number of gradients in the means; at most ``1 / (1 - beta)``.
      m_hat: mean of the gradients, with the shapes and sharding of the parameters.
      v_hat: mean of their squares.
      a_hat: mean of their absolute values; ``None`` unless the measure needs it.
      c: the overconfidence of the last step, to recompute the scales from the state.
      eps: the epsilon of the last step, for the same purpose.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32.
    n: jax.Array  # shape=().
    m_hat: optax.Updates
    v_hat: optax.Updates
    a_hat: optax.Updates | None
    c: jax.Array  # shape=().
    eps: jax.Array  # shape=().


class Settings(NamedTuple):
    """The settings of the statistics and of the scale."""

    beta: jax.typing.ArrayLike
    c: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    measure: str | Measure
    moment_dtype: jax.typing.DTypeLike | None

    def checked(self) -> Settings:
        """Return the settings, or raise if one is invalid. Arrays may be traced or on a device, and are not checked."""
        beta, c, eps, measure, moment_dtype = self
        if _is_number(beta) and not 0 <= beta < 1:
            raise ValueError(f"invalid beta {beta}: the horizon must be in [0, 1); 0.999 looks back about 1,000 steps")
        if _is_number(c) and not c > 0:
            raise ValueError(f"invalid c {c}: the overconfidence must be in (0, inf]; the paper uses 1")
        if _is_number(eps) and not 0 <= eps < math.inf:
            raise ValueError(f"invalid eps {eps}: it must be in [0, inf); the paper uses 1e-8")
        resolve_measure(measure)
        return self._replace(moment_dtype=check_moment_dtype(moment_dtype))

    def init(self, params: optax.Params) -> ConformityState:
        """Statistics before the first gradient."""
        leaves = jax.tree.leaves(params)
        for p in leaves:
            _refuse_complex(p)

        # The precision of the most precise parameter; cast down when used with another one.
        dtype = jnp.result_type(jnp.float32, *(p.dtype for p in leaves))
        return ConformityState(
            count=jnp.zeros([], jnp.int32),
            n=jnp.zeros([], dtype),
            m_hat=self.zeros(params),
            v_hat=self.zeros(params),
            a_hat=self.zeros(params) if needs_mean_abs(self.measure) else None,
            c=jnp.asarray(self.c, dtype),
            eps=jnp.asarray(self.eps, dtype),
        )

    def zeros(self, params: optax.Params) -> optax.Updates:
        """Zero means with the shapes and sharding of the parameters, in ``moment_dtype`` or at compute precision."""
        return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=self.moment_dtype or arithmetic_dtype(p.dtype)), params)

    def observe(self, grads: optax.Updates, state: ConformityState) -> ConformityState:
        """The statistics after one more gradient, at compute precision."""
        n = next_number(state.n, self.beta)
        a_hat = state.a_hat
        if a_hat is not None:
            a_hat = jax.tree.map(lambda g, a: mean(jnp.abs(g), a, n), grads, a_hat)
        return ConformityState(
            count=optax.safe_increment(state.count),
            n=n,
            m_hat=jax.tree.map(lambda g, m: mean(g, m, n), grads, state.m_hat),
            v_hat=jax.tree.map(lambda g, v: mean(jnp.square(wide(g)), v, n), grads, state.v_hat),
            a_hat=a_hat,
            c=jnp.asarray(self.c, state.c.dtype),
            eps=jnp.asarray(self.eps, state.eps.dtype),
        )


def next_number(n: jax.Array, beta: jax.typing.ArrayLike) -> jax.Array:
    """``1 + beta n``, with ``1 - beta`` computed before a Python number is rounded to the array's dtype."""
    return n + (1 - (1 - (wide(beta) if isinstance(beta, jax.Array) else beta)) * n)


def mean(x: jax.Array, past: jax.Array, n: jax.Array) -> jax.Array:
    """The running mean of ``n`` numbers after adding ``x``."""
    x, past = wide(x), past.astype(wide(x).dtype)
    return past + (x - past) * (1 / n).astype(x.dtype)


def wide(x: jax.Array) -> jax.Array:
    """Convert to compute precision."""
    return x.astype(arithmetic_dtype(x.dtype))


def scales(state: ConformityState, measure: str | Measure) -> optax.Updates:
    """The scale of each element."""

    def scale(m_hat: jax.Array, v_hat: jax.Array, a_hat: jax.Array | None = None) -> jax.Array:
        return conformity_scale(m_hat, v_hat, state.n, c=state.c, eps=state.eps, measure=measure, a_hat=a_hat)

    means = (state.m_hat, state.v_hat) if state.a_hat is None else (state.m_hat, state.v_hat, state.a_hat)
    return jax.tree.map(scale, *means)


def stored(new: State, past: State, count: jax.Array) -> State:
    """Convert a new state to the dtypes of the past one."""
    return cast("State", jax.tree.map(lambda x, old: store(x, old.dtype, count), new, past))


def scaled(updates: optax.Updates, scales: optax.Updates) -> optax.Updates:
    """Updates times scales, in the updates' dtypes."""
    return jax.tree.map(lambda u, s: (u * s).astype(u.dtype), updates, scales)


def usable_or_zero(g: jax.Array) -> jax.Array:
    """Replace gradient elements with zero if they are NaN or their square would overflow."""
    largest = math.sqrt(float(jnp.finfo(arithmetic_dtype(g.dtype)).max))  # type: ignore[no-untyped-call]
    return jnp.where(jnp.abs(wide(g)) < largest, g, jnp.zeros_like(g))


def _is_number(x: Any) -> TypeGuard[float]:
    return isinstance(x, (int, float, np.number))


def _refuse_complex(p: jax.Array) -> None:
    if jnp.iscomplexobj(p):
        raise TypeError(
            f"a parameter has dtype {p.dtype}, and complex gradients have no sign: "
            "wrap CProp in optax.contrib.split_real_and_imaginary"
        )
