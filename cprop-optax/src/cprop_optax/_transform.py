"""CProp as a gradient transformation: around any optimizer, or in a chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cprop_optax._conformity import Measure, arithmetic_dtype, conformity_scale, needs_mean_abs, resolve_measure
from cprop_optax._storage import check_moment_dtype, store


class ConformityState(NamedTuple):
    """Statistics of the past gradients: all that CProp keeps between two steps.

    Attributes:
      count: number of steps.
      n: number of gradients that the means stand for; at most ``1 / (1 - beta)``.
      m_hat: mean of the gradients, shaped and sharded like the parameters.
      v_hat: mean of their squares.
      a_hat: mean of their absolute values; ``None`` unless the measure needs it.
      c: the overconfidence of the last step, for :func:`cprop_optax.cprop_scales` to read.
      eps: the epsilon of the last step, likewise.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32.
    n: jax.Array  # shape=().
    m_hat: optax.Updates
    v_hat: optax.Updates
    a_hat: optax.Updates | None
    c: jax.Array  # shape=().
    eps: jax.Array  # shape=().


class CPropState(NamedTuple):
    """State of :func:`cprop_optax.cprop`: its own, and the inner optimizer's."""

    conformity: ConformityState
    inner_state: optax.OptState


class _Conformity(NamedTuple):
    """What both transformations are made of."""

    init: Callable[[optax.Params], ConformityState]
    scale: Callable[[optax.Updates, optax.Updates, ConformityState], tuple[optax.Updates, ConformityState]]
    """``(updates, grads, state) -> (scaled updates, new state)``"""


def _conformity(
    beta: jax.typing.ArrayLike,
    c: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    measure: str | Measure,
    moment_dtype: jax.typing.DTypeLike | None,
) -> _Conformity:
    _check_settings(beta, c, eps)
    resolve_measure(measure)
    storage = check_moment_dtype(moment_dtype)

    def init(params: optax.Params) -> ConformityState:
        for leaf in jax.tree.leaves(params):
            _refuse_complex(leaf)

        def zeros(p: jax.Array) -> jax.Array:
            return jnp.zeros_like(p, dtype=arithmetic_dtype(p.dtype) if storage is None else storage)

        # As precise as the most precise parameter: the scalars are cast down where they meet others.
        dtype = jnp.result_type(jnp.float32, *(p.dtype for p in jax.tree.leaves(params)))
        return ConformityState(
            count=jnp.zeros([], jnp.int32),
            n=jnp.zeros([], dtype),
            m_hat=jax.tree.map(zeros, params),
            v_hat=jax.tree.map(zeros, params),
            a_hat=jax.tree.map(zeros, params) if needs_mean_abs(measure) else None,
            c=jnp.asarray(c, dtype),
            eps=jnp.asarray(eps, dtype),
        )

    def scale(
        updates: optax.Updates, grads: optax.Updates, state: ConformityState
    ) -> tuple[optax.Updates, ConformityState]:
        count = optax.safe_increment(state.count)
        # n_t = 1 + beta n_{t-1}, with 1 - beta taken before it is rounded to the array's dtype.
        n = state.n + (1 - (1 - _at_least_float32(beta)) * state.n)

        def mean(x: jax.Array, past: jax.Array) -> jax.Array:
            # The mean with its bias corrected, by its own recurrence: m_hat_t = m_hat_{t-1} + (g_t - m_hat_{t-1}) / n_t
            # equals (beta m_{t-1} + (1 - beta) g_t) / (1 - beta^t), and stays a mean if beta changes.
            past = past.astype(x.dtype)
            return past + (x - past) * (1 / n).astype(x.dtype)

        g = jax.tree.map(lambda g: g.astype(arithmetic_dtype(g.dtype)), grads)
        m_hat = jax.tree.map(mean, g, state.m_hat)
        v_hat = jax.tree.map(lambda g, v: mean(jnp.square(g), v), g, state.v_hat)
        a_hat = None if state.a_hat is None else jax.tree.map(lambda g, a: mean(jnp.abs(g), a), g, state.a_hat)

        scales = _scales(m_hat, v_hat, a_hat, n=n, c=c, eps=eps, measure=measure)
        updates = jax.tree.map(lambda u, s: (u * s).astype(u.dtype), updates, scales)

        def stored(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda x, past: store(x, past.dtype, count), new, old)

        return updates, ConformityState(
            count=count,
            n=n,
            m_hat=stored(m_hat, state.m_hat),
            v_hat=stored(v_hat, state.v_hat),
            a_hat=stored(a_hat, state.a_hat),
            c=jnp.asarray(c, state.c.dtype),
            eps=jnp.asarray(eps, state.eps.dtype),
        )

    return _Conformity(init, scale)


def _scales(m_hat: Any, v_hat: Any, a_hat: Any, **settings: Any) -> Any:
    """The scale of each leaf."""
    if a_hat is None:
        return jax.tree.map(lambda m, v: conformity_scale(m, v, **settings), m_hat, v_hat)
    return jax.tree.map(lambda m, v, a: conformity_scale(m, v, a_hat=a, **settings), m_hat, v_hat, a_hat)


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
    conformity = _conformity(beta, c, eps, measure, moment_dtype)
    inner = optax.with_extra_args_support(_refuse_factory(inner))

    def init_fn(params: optax.Params) -> CPropState:
        return CPropState(conformity=conformity.init(params), inner_state=inner.init(params))

    def update_fn(
        updates: optax.Updates, state: CPropState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, CPropState]:
        grads = jax.tree.map(_usable_or_zero, updates)
        inner_updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        scaled, conformity_state = conformity.scale(inner_updates, grads, state.conformity)
        return scaled, CPropState(conformity=conformity_state, inner_state=inner_state)

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
    conformity = _conformity(beta, c, eps, measure, moment_dtype)

    def update_fn(
        updates: optax.Updates, state: ConformityState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ConformityState]:
        del params
        grads = jax.tree.map(_usable_or_zero, updates)
        return conformity.scale(grads, grads, state)

    return optax.GradientTransformation(conformity.init, update_fn)


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
    (one,) = found
    return _scales(one.m_hat, one.v_hat, one.a_hat, n=one.n, c=one.c, eps=one.eps, measure=measure)


def _is_conformity_state(x: Any) -> bool:
    return isinstance(x, ConformityState)


def _usable_or_zero(g: jax.Array) -> jax.Array:
    """The gradient, or zero where it is NaN or too large for its square to be a number."""
    square = jnp.square(g.astype(arithmetic_dtype(g.dtype)))
    return jnp.where(jnp.isfinite(square), g, jnp.zeros_like(g))


def _at_least_float32(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """A setting to compute with: a Python number keeps its digits, an array in half precision gets more."""
    return x.astype(arithmetic_dtype(x.dtype)) if isinstance(x, jax.Array) else x


def _check_settings(beta: jax.typing.ArrayLike, c: jax.typing.ArrayLike, eps: jax.typing.ArrayLike) -> None:
    """Refuse settings out of range. Arrays are not looked at: they may be traced, or on a device."""
    if isinstance(beta, (int, float)) and not 0 <= beta < 1:
        raise ValueError(f"invalid beta {beta}: the horizon must lie in [0, 1); 0.999 looks back about 1,000 steps")
    if isinstance(c, (int, float)) and not c > 0:
        raise ValueError(f"invalid c {c}: the overconfidence must lie in (0, inf]; 1 is the paper's")
    if isinstance(eps, (int, float)) and not 0 <= eps < math.inf:
        raise ValueError(f"invalid eps {eps}: it must lie in [0, inf); 1e-8 is the paper's")


def _refuse_complex(p: jax.Array) -> None:
    if jnp.iscomplexobj(p):
        raise TypeError(
            f"a parameter has dtype {p.dtype}, and a complex gradient has no sign to be sure of: "
            "put optax.contrib.split_real_and_imaginary around CProp"
        )


def _refuse_factory(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"cprop wraps an optax optimizer, and got {inner!r}: write cprop(optax.adam(1e-3)); settings of CProp's "
            "own go behind it"
        )
    return inner
