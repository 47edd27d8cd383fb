"""Settings: what is refused and how, and what may change in mid-training."""

import math
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streams import stream

from cprop_optax import conformity_scale, cprop, cprop_scales, scale_by_conformity

INVALID = [
    ({"beta": 1.0}, r"invalid beta 1\.0: the horizon must be in \[0, 1\); 0\.999 looks back about 1,000 steps"),
    ({"beta": -0.1}, r"invalid beta -0\.1"),
    ({"beta": math.nan}, r"invalid beta nan"),
    ({"beta": np.float32(1.5)}, r"invalid beta 1\.5"),
    ({"c": 0.0}, r"invalid c 0\.0: the overconfidence must be in \(0, inf\]; the paper uses 1"),
    ({"c": math.nan}, r"invalid c nan"),
    ({"eps": -1e-8}, r"invalid eps -1e-08: it must be in \[0, inf\); the paper uses 1e-8"),
    ({"eps": math.inf}, r"invalid eps inf"),
    ({"measure": "cauchy"}, r"unknown measure 'cauchy': choose one of 'normal', .*, or pass a function moments -> s"),
    (
        {"moment_dtype": "float16"},
        r"invalid moment_dtype 'float16': .* need the range of 'bfloat16' \(half the memory\) or 'float32'",
    ),
    ({"moment_dtype": jnp.int32}, r"invalid moment_dtype 'int32'"),
]


@pytest.mark.parametrize(("setting", "message"), INVALID)
@pytest.mark.parametrize("make", [partial(cprop, optax.identity()), scale_by_conformity])
def test_invalid_settings_are_refused_with_the_mend(make, setting, message):
    with pytest.raises(ValueError, match=message):
        make(**setting)


def test_a_factory_in_place_of_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"cprop wraps an optax optimizer, but got <function adam.*write cprop\(optax"):
        cprop(optax.adam)


def test_complex_parameters_are_refused_and_the_mend_works():
    params = jnp.ones(2, jnp.complex64)
    with pytest.raises(TypeError, match=r"dtype complex64, .*: wrap CProp in optax\.contrib\.split_real_and_imaginary"):
        cprop(optax.sgd(0.1)).init(params)
    optimizer = optax.contrib.split_real_and_imaginary(cprop(optax.sgd(0.1)))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates, -0.1 * params)


def test_relative_rate_asks_for_the_mean_it_needs():
    message = re.escape("measure 'relative_rate' needs the mean of |g|: pass a_hat=...")
    with pytest.raises(ValueError, match=message):
        conformity_scale(1.0, 1.0, 2.0, measure="relative_rate")
    state = cprop(optax.sgd(0.1)).init(jnp.ones(2))
    with pytest.raises(ValueError, match=message):
        cprop_scales(state, "relative_rate")


def test_scales_of_a_state_without_or_with_several_statistics_are_refused():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"found them 0 times: pass the state of cprop or scale_by_conformity"):
        cprop_scales(optax.adam(1e-3).init(params))
    several = optax.multi_transform({k: cprop(optax.sgd(0.1)) for k in params}, {k: k for k in params})
    with pytest.raises(ValueError, match=r"found them 2 times: pass the state of one of them"):
        cprop_scales(several.init(params))


def run(optimizer, gradients, change=lambda t, state: state):
    params = jnp.zeros(gradients.shape[1])
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for t, g in enumerate(gradients):
        updates, state = update(jnp.asarray(g), change(t, state), params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    return params, state


def test_settings_may_be_injected_and_scheduled():
    gradients = stream(20)
    injected = optax.inject_hyperparams(partial(cprop, optax.adam(0.1)))
    schedule = optax.linear_schedule(1.0, 3.0, 15)
    params, state = run(injected(c=schedule, eps=1e-6), gradients)
    assert {"beta", "c", "eps"} <= set(state.hyperparams)
    assert float(state.inner_state.conformity.c) == 3.0
    # The same by hand: one optimizer a step, on one state.
    expected = jnp.zeros(gradients.shape[1])
    state = cprop(optax.adam(0.1)).init(expected)
    for t, g in enumerate(gradients):
        updates, state = cprop(optax.adam(0.1), c=float(schedule(t)), eps=1e-6).update(jnp.asarray(g), state, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(params, expected, atol=1e-4)


def test_injected_settings_may_be_changed_in_the_state_without_compiling_again():
    def set_c(t, state):
        hyperparams = {**state.hyperparams, "c": jnp.asarray(jnp.inf if t >= 10 else 1e-3, jnp.float32)}
        return state._replace(hyperparams=hyperparams)

    injected = optax.inject_hyperparams(partial(cprop, optax.sgd(1.0)))(c=1.0)
    gradients = stream(20)
    params, _ = run(injected, gradients, set_c)
    np.testing.assert_allclose(params, -gradients[10:].sum(0), atol=0.02)  # ten steps of at most 0.001, ten in full


def test_functions_and_dtypes_can_be_injected_if_they_are_named_static():
    injected = optax.inject_hyperparams(cprop, static_args=("measure", "moment_dtype"))
    optimizer = injected(
        optax.adam(0.1), measure=lambda moments: jnp.ones_like(moments.m_hat), moment_dtype=jnp.bfloat16
    )
    params, state = run(optimizer, stream(5))
    np.testing.assert_allclose(params, run(optax.adam(0.1), stream(5))[0], atol=1e-6)
    assert state.inner_state.conformity.m_hat.dtype == jnp.bfloat16


def test_half_precision_parameters_want_injected_settings_in_float32():
    """As the note in the docstring says: optax makes settings in the parameters' dtype, and 0.999 is 1 in bfloat16."""
    params = jnp.zeros(3, jnp.bfloat16)
    rounded = optax.inject_hyperparams(partial(cprop, optax.sgd(0.1)))(beta=0.999).init(params)
    assert float(rounded.hyperparams["beta"]) == 1.0
    injected = optax.inject_hyperparams(partial(cprop, optax.sgd(0.1)), hyperparam_dtype=jnp.float32)(beta=0.999)
    state = injected.init(params)
    for _ in range(5):
        updates, state = injected.update(jnp.ones_like(params), state, params)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_allclose(state.inner_state.conformity.n, sum(0.999**i for i in range(5)), rtol=1e-6)


def test_means_stay_means_if_beta_changes():
    """A constant gradient has the mean it has, whatever the horizon was, is and will be."""
    betas = jnp.array([0.9] * 40 + [0.9999] * 40 + [0.5] * 5)
    state = scale_by_conformity().init(jnp.zeros(1))
    observe = jax.jit(lambda beta, state: scale_by_conformity(beta=beta).update(jnp.full(1, 3.0), state)[1])
    for beta in betas:
        state = observe(beta, state)
        np.testing.assert_allclose(state.m_hat, 3.0, rtol=1e-6)
        np.testing.assert_allclose(state.v_hat, 9.0, rtol=1e-6)
    assert 1 < float(state.n) < 5


def test_nothing_but_jax_and_optax_is_imported():
    code = (
        "import sys, jax, optax; before = set(sys.modules); import cprop_optax; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "['cprop_optax', 'numpy']"  # a module of numpy that jax had not asked for
