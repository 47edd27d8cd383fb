"""Adam + CProp as one transformation, with a shared mean square."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cprop_optax._conformity import Measure
from cprop_optax._statistics import (
    ConformityState,
    Settings,
    mean,
    next_number,
    scales,
    stored,
    usable_or_zero,
)


class CPropAdamState(NamedTuple):
    """State of :func:`cprop_optax.scale_by_cprop_adam`.

    Attributes:
      conformity: CProp's statistics; their mean square is also Adam's.
      n: effective number of gradients in Adam's mean.
      mu_hat: Adam's bias-corrected mean of the gradients.
    """

    conformity: ConformityState
    n: jax.Array  # shape=().
    mu_hat: optax.Updates


def scale_by_cprop_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    c: jax.typing.ArrayLike = 1.0,
    conformity_eps: jax.typing.ArrayLike = 0.0,
    measure: str | Measure = "normal",
    *,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Rescale updates as in Adam, and scale them down where past gradients disagree.

    .. math::

      \hat g_t = \hat s_t \, \hat\mu_t / (\sqrt{\hat v_t} + \epsilon)

    with Adam's means :math:`\hat\mu_t` and :math:`\hat v_t`, and the scale :math:`\hat s_t` of
    :func:`cprop_optax.cprop` with the horizon :math:`\beta = \beta_2`. The result is the same as for
    ``cprop(optax.scale_by_adam(b1, b2, eps), beta=b2)``, but Adam and CProp share one mean square.

    Args:
      b1: decay of Adam's mean.
      b2: decay of the mean square, and horizon of CProp's mean.
      eps: Adam's :math:`\epsilon`.
      c: overconfidence; see :func:`cprop_optax.cprop` for this and the following arguments.
      conformity_eps: :math:`\epsilon` of the standard error.
      measure: the conformity measure.
      moment_dtype: dtype of all means.

    Returns:
      A :class:`optax.GradientTransformation`.

    Examples:
      >>> import cprop_optax
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> def f(x): return jnp.sum(x ** 2)  # simple quadratic function
      >>> optimizer = optax.chain(
      ...   cprop_optax.scale_by_cprop_adam(),
      ...   optax.add_decayed_weights(1e-4),  # decoupled, and not scaled
      ...   optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = jnp.array([1., 2., 3.])
      >>> opt_state = optimizer.init(params)
      >>> for _ in range(3):
      ...   grad = jax.grad(f)(params)
      ...   updates, opt_state = optimizer.update(grad, opt_state, params)
      ...   params = optax.apply_updates(params, updates)
      ...   print(f'Objective function: {f(params):.2f}')
      Objective function: 12.83
      Objective function: 11.72
      Objective function: 10.68

    References:
      Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
      Conformity*, 2019

      Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2014
    """
    settings = Settings(b2, c, conformity_eps, measure, moment_dtype).checked()

    def init_fn(params: optax.Params) -> CPropAdamState:
        conformity = settings.init(params)
        return CPropAdamState(conformity, n=jnp.zeros_like(conformity.n), mu_hat=settings.zeros(params))

    def update_fn(
        updates: optax.Updates, state: CPropAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, CPropAdamState]:
        del params
        grads = jax.tree.map(usable_or_zero, updates)
        seen = settings.observe(grads, state.conformity)
        n = next_number(state.n, b1)
        mu_hat = jax.tree.map(lambda g, mu: mean(g, mu, n), grads, state.mu_hat)

        def step(mu_hat: jax.Array, v_hat: jax.Array, scale: jax.Array, g: jax.Array) -> jax.Array:
            return (scale * mu_hat / (jnp.sqrt(v_hat) + jnp.asarray(eps, v_hat.dtype))).astype(g.dtype)

        updates = jax.tree.map(step, mu_hat, seen.v_hat, scales(seen, measure), grads)
        return updates, stored(CPropAdamState(seen, n, mu_hat), state, seen.count)

    return optax.GradientTransformation(init_fn, update_fn)
