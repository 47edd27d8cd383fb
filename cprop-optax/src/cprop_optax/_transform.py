"""CProp as a gradient transformation: it wraps any optimizer, or comes first in a chain."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from cprop_optax._conformity import Measure
from cprop_optax._statistics import ConformityState, Settings, scaled, scales, stored, usable_or_zero


class CPropState(NamedTuple):
    """State of :func:`cprop_optax.cprop`: CProp's statistics, and the inner optimizer's state."""

    conformity: ConformityState
    inner_state: optax.OptState


def cprop(
    inner: optax.GradientTransformation,
    beta: jax.typing.ArrayLike = 0.999,
    c: jax.typing.ArrayLike = 1.0,
    eps: jax.typing.ArrayLike = 0.0,
    measure: str | Measure = "normal",
    *,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale an optimizer's updates down where past gradients disagree.

    CProp tracks the mean and the mean square of each parameter's gradient over about
    :math:`1/(1-\beta)` steps. It multiplies the inner optimizer's update :math:`\hat g_t` by its
    confidence in the sign of the mean (Algorithm 1):

    .. math::

      \begin{align*}
        n_t &= 1 + \beta n_{t-1} = (1 - \beta^t) / (1 - \beta) \\
        \hat m_t &= \hat m_{t-1} + (g_t - \hat m_{t-1}) / n_t \\
        \hat v_t &= \hat v_{t-1} + (g_t^2 - \hat v_{t-1}) / n_t \\
        \sigma_t &= \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon \\
        \hat s_t &= \min\left(2c\,\left|\mathrm{CDF}_{\mathcal N(\hat m_t, \sigma_t)}(0) - \tfrac12\right|, 1\right) \\
        \theta_t &= \theta_{t-1} + \hat s_t \cdot \hat g_t
      \end{align*}

    It only scales down, so choose the learning rate that reduces the loss fastest at the start, not
    the one that is safe until the end (section 4.1).

    Everything that the inner optimizer returns is scaled, including weight decay, which is part of the
    updates in optax. To leave decoupled decay unscaled, put it outside::

      optax.chain(
          cprop_optax.cprop(optax.scale_by_adam()),
          optax.add_decayed_weights(weight_decay),
          optax.scale_by_learning_rate(learning_rate),
      )

    Gradient elements that are NaN, or whose square is not finite, count as zero, for the inner
    optimizer too: they would stay in the means forever. To skip such a batch altogether, wrap CProp in
    :func:`optax.apply_if_finite`.

    Args:
      inner: the optimizer to scale, or any transformation of gradients into updates.
      beta: horizon :math:`\beta` of the statistics, in [0, 1); 0.999 looks back about 1,000 steps.
      c: overconfidence :math:`c`, above 0 (equation 9); larger values trade training speed for
        generalization, and infinity disables the scaling.
      eps: :math:`\epsilon` of the standard error, at least 0. It is absolute: the paper's 1e-8 slows
        down learning where gradients are below about 1e-6.
      measure: the conformity measure: ``"normal"``, ``"student_t"``, ``"logistic"``,
        ``"moment_rate"``, ``"relative_rate"``, or a function; see :func:`cprop_optax.conformity_scale`.
      moment_dtype: dtype of the statistics; ``None`` for float32, or float64 for float64 parameters.
        ``"bfloat16"`` halves their memory, with stochastic rounding. Arithmetic is at least in float32.

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
      With :func:`optax.inject_hyperparams`, ``beta``, ``c`` and ``eps`` can be scheduled or changed
      in the state. For half-precision parameters, pass ``hyperparam_dtype=jnp.float32``: 0.999 would round
      to 1. If ``measure`` or ``moment_dtype`` is an object, pass ``static_args=("measure", "moment_dtype")``:
      optax treats every callable as a schedule.
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
    eps: jax.typing.ArrayLike = 0.0,
    measure: str | Measure = "normal",
    *,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Scale gradients by their own conformity.

    Put it first in a chain, because it needs the raw gradients. It equals CProp if the rest of the chain
    only multiplies by a number, as in SGD without momentum. With momentum or a division by past
    gradients, the scale passes through those averages first; use :func:`cprop_optax.cprop` for the
    paper's algorithm.

    Args:
      beta: horizon of the statistics; see :func:`cprop_optax.cprop` for this and the following arguments.
      c: overconfidence.
      eps: added to the standard error.
      measure: the conformity measure.
      moment_dtype: dtype of the statistics.

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
      ...   grad = jnp.array([1., sign])  # one constant gradient, and one that changes its sign
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
    """The scales of the last update, recomputed from the statistics in a state.

    Args:
      state: the state of :func:`cprop_optax.cprop` or :func:`cprop_optax.scale_by_conformity`, or of a
        transformation that contains one of them.
      measure: the measure of that transformation.

    Returns:
      A tree of scales in [0, 1], with the structure of the parameters. They equal those of the last update
      bit for bit, or to bfloat16 precision if that is the ``moment_dtype``. Before the first update they are
      zero.

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
        mend = "pass the state of cprop or scale_by_conformity" if not found else "pass the state of one of them"
        raise ValueError(f"expected a state with CProp's statistics once, but found them {len(found)} times: {mend}")
    return scales(found[0], measure)


def _is_conformity_state(x: Any) -> bool:
    return isinstance(x, ConformityState)


def _refuse_factory(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"cprop wraps an optax optimizer, but got {inner!r}: write cprop(optax.adam(1e-3)), with CProp's settings "
            "after it"
        )
    return inner
