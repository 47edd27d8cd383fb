"""CProp as a gradient transformation: around any optimizer, or first in a chain."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from cprop_optax._conformity import Measure
from cprop_optax._statistics import ConformityState, Settings, scaled, scales, stored, usable_or_zero


class CPropState(NamedTuple):
    """State of :func:`cprop_optax.cprop`: its own, and the inner optimizer's."""

    conformity: ConformityState
    inner_state: optax.OptState


def cprop(
    inner: optax.GradientTransformation,
    beta: jax.typing.ArrayLike = 0.999,
    c: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 1e-8,
    measure: str | Measure = "normal",
    *,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale an optimizer's updates down where past gradients disagree.

    CProp keeps the mean and the mean square of each parameter's gradient over about
    :math:`1/(1-\beta)` steps, asks how sure it is of the mean's sign, and multiplies the update of
    the inner optimizer, :math:`\hat g_t`, with that confidence (Algorithm 1):

    .. math::

      \begin{align*}
        n_t &= 1 + \beta n_{t-1} = (1 - \beta^t) / (1 - \beta) \\
        \hat m_t &= \hat m_{t-1} + (g_t - \hat m_{t-1}) / n_t \\
        \hat v_t &= \hat v_{t-1} + (g_t^2 - \hat v_{t-1}) / n_t \\
        \sigma_t &= \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon \\
        \hat s_t &= \min\left(2c\,\left|\mathrm{CDF}_{\mathcal N(\hat m_t, \sigma_t)}(0) - \tfrac12\right|, 1\right) \\
        \theta_t &= \theta_{t-1} + \hat s_t \cdot \hat g_t
      \end{align*}

    It only scales down: choose the learning rate that reduces the loss fastest at the start, not the
    one that would be safe to the end (section 4.1).

    Everything the inner optimizer returns is scaled, weight decay included, for in optax the decay
    is part of the updates. To leave decoupled decay unscaled, put it outside::

      optax.chain(
          cprop_optax.cprop(optax.scale_by_adam()),
          optax.add_decayed_weights(weight_decay),
          optax.scale_by_learning_rate(learning_rate),
      )

    An element of a gradient counts as zero, for the inner optimizer too, if it is NaN or its square is
    not finite: it would stay in the means for ever. To leave such a batch out altogether, put
    :func:`optax.apply_if_finite` around CProp.

    Args:
      inner: the optimizer to scale, or any transformation of gradients into updates.
      beta: horizon :math:`\beta` of the statistics, in [0, 1); 0.999 looks back about 1,000 steps.
      c: overconfidence :math:`c`, above 0 (equation 9); larger values trade training speed for
        generalisation, and infinity is the inner optimizer as it is.
      eps: :math:`\epsilon` of the standard error, at least 0. It is absolute: with gradients below
        about 1e-6 lower it, down to 0, or it holds the learning back.
      measure: how conformity is measured: ``"normal"``, ``"student_t"``, ``"logistic"``,
        ``"moment_rate"``, ``"relative_rate"``, or a function; see :func:`cprop_optax.conformity_scale`.
      moment_dtype: dtype in which the statistics are kept; ``None`` for float32, or float64 where the
        parameter is. ``"bfloat16"`` halves them, rounded stochastically. Arithmetic is in float32
        at least.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`; extra arguments go to the inner
      optimizer.

    Examples:
      >>> import cprop_optax
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> def f(x): return jnp.sum(x ** 2)  # simple quadratic function
      >>> optimizer = cprop_optax.cprop(optax.adam(learning_rate=0.1))
      >>> params = jnp.array([1., 2., 3.])
      >>> opt_state = optimizer.init(params)
      >>> for _ in range(5):
      ...   grad = jax.grad(f)(params)
      ...   updates, opt_state = optimizer.update(grad, opt_state, params)
      ...   params = optax.apply_updates(params, updates)
      ...   print(f'Objective function: {f(params):.2f}')
      Objective function: 12.83
      Objective function: 11.72
      Objective function: 10.68
      Objective function: 9.69
      Objective function: 8.78

    References:
      Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
      Conformity*, 2019

    .. note::
      With :func:`optax.inject_hyperparams`, ``beta``, ``c`` and ``eps`` may be scheduled or changed
      in the state. Give ``hyperparam_dtype=jnp.float32`` if the parameters are in half precision, where 0.999
      is 1, and ``static_args=("measure", "moment_dtype")`` if either is given as an object: optax takes
      whatever can be called for a schedule.
    """
    settings = Settings(beta, c, eps, measure, moment_dtype).checked()
    inner = optax.with_extra_args_support(_refuse_factory(inner))

    def init_fn(params: optax.Params) -> CPropState:
        return CPropState(conformity=settings.init(params), inner_state=inner.init(params))

    def update_fn(
        updates: optax.Updates, state: CPropState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, CPropState]:
        grads = jax.tree.map(usable_or_zero, updates)
        seen = settings.observe(grads, state.conformity)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        updates = scaled(updates, scales(seen, measure))
        return updates, CPropState(conformity=stored(seen, state.conformity, seen.count), inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_conformity(
    beta: jax.typing.ArrayLike = 0.999,
    c: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 1e-8,
    measure: str | Measure = "normal",
    *,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Scale gradients by their own conformity.

    For a chain, where it must stand first, since it takes what it is handed for the raw gradients. It
    is CProp if what follows multiplies with a number alone, as SGD without momentum does. Where momentum
    or a division by past gradients follows, the scale passes through those averages first; the algorithm
    of the paper is then :func:`cprop_optax.cprop`.

    Args:
      beta: horizon of the statistics; see :func:`cprop_optax.cprop`, also for what follows.
      c: overconfidence.
      eps: added to the standard error.
      measure: how conformity is measured.
      moment_dtype: dtype in which the statistics are kept.

    Returns:
      A :class:`optax.GradientTransformation`.

    Examples:
      >>> import cprop_optax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> optimizer = optax.chain(cprop_optax.scale_by_conformity(), optax.sgd(learning_rate=1.0))
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> for sign in (1., -1., 1.):
      ...   grad = jnp.array([1., sign])  # one gradient that stays, and one that turns around
      ...   updates, state = optimizer.update(grad, state)
      ...   print(updates.round(2))
      [-1. -1.]
      [-1.  0.]
      [-1.   -0.38]

    References:
      Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
      Conformity*, 2019
    """
    settings = Settings(beta, c, eps, measure, moment_dtype).checked()

    def update_fn(
        updates: optax.Updates, state: ConformityState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ConformityState]:
        del params
        grads = jax.tree.map(usable_or_zero, updates)
        seen = settings.observe(grads, state)
        return scaled(grads, scales(seen, measure)), stored(seen, state, seen.count)

    return optax.GradientTransformation(settings.init, update_fn)


def cprop_scales(state: optax.OptState, measure: str | Measure = "normal") -> optax.Updates:
    """The scales of the last update, computed anew from the statistics in a state.

    Args:
      state: the state of :func:`cprop_optax.cprop` or :func:`cprop_optax.scale_by_conformity`, or of a
        transformation that holds one of them.
      measure: the one that the transformation was made with.

    Returns:
      A tree like the parameters', of scales in [0, 1]. They are those of the last update to the bit, or as
      near as bfloat16 is if that is the ``moment_dtype``; before the first update they are zero.

    Examples:
      >>> import cprop_optax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> optimizer = cprop_optax.cprop(optax.adam(1e-3), c=2.0)
      >>> params = {'w': jnp.zeros(2)}
      >>> state = optimizer.init(params)
      >>> for sign in (1., -1., 1.):
      ...   _, state = optimizer.update({'w': jnp.array([1., sign / 5])}, state, params)
      >>> print(cprop_optax.cprop_scales(state)['w'].round(4))
      [1.     0.7653]
    """
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_conformity_state) if _is_conformity_state(x)]
    if len(found) != 1:
        mend = "pass that of cprop or scale_by_conformity" if not found else "pass one of them"
        raise ValueError(f"a state with CProp's statistics is wanted, and this one holds {len(found)} of them: {mend}")
    return scales(found[0], measure)


def _is_conformity_state(x: Any) -> bool:
    return isinstance(x, ConformityState)


def _refuse_factory(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"cprop wraps an optax optimizer, and got {inner!r}: write cprop(optax.adam(1e-3)); settings of CProp's "
            "own go behind it"
        )
    return inner
