"""Algorithm 1 in float64, line by line, is what every number is held against: the repository's ``tests/oracle.py``."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from oracle import Oracle
from scipy import stats
from streams import stream

import cprop_optax
from cprop_optax import MEASURES, Moments, conformity_scale, cprop_scales, scale_by_conformity
from cprop_optax._conformity import LOGISTIC_SLOPE


def scales_over_time(gradients, measure="normal", **options):
    """The scales after each gradient, from one compiled scan."""
    transformation = scale_by_conformity(measure=measure, **options)

    def step(state, g):
        _, state = transformation.update(g, state)
        return state, cprop_scales(state, measure)

    gradients = jnp.asarray(gradients)
    return np.asarray(jax.lax.scan(step, transformation.init(gradients[0]), gradients)[1])


CASES = [("normal", beta) for beta in (0.5, 0.9, 0.999, 0.9999)]
CASES += [("student_t", 0.9), ("student_t", 0.999), ("moment_rate", 0.9), ("relative_rate", 0.999)]


@pytest.mark.parametrize(("measure", "beta"), CASES)
def test_float32_follows_algorithm_1_at_every_step(beta, measure):
    gradients = stream()
    oracle = Oracle(beta)
    for g, scale in zip(gradients, scales_over_time(gradients, measure, beta=beta), strict=True):
        np.testing.assert_allclose(scale, oracle.observe(g).scale(measure), atol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999, 0.9999])
def test_float64_follows_algorithm_1_to_1e12(beta):
    with jax.enable_x64(True):
        gradients = stream().astype(np.float64)
        oracle = Oracle(beta, c=1.5)
        for g, scale in zip(gradients, scales_over_time(gradients, beta=beta, c=1.5), strict=True):
            np.testing.assert_allclose(scale, oracle.observe(g).scale(), atol=1e-12)


def test_the_whole_step_follows_algorithm_1():
    """theta_t = theta_{t-1} + s_t g_t, with plain gradient descent for g_t."""
    with jax.enable_x64(True):
        gradients = stream(200).astype(np.float64)
        optimizer = cprop_optax.cprop(optax.sgd(0.1))
        update = jax.jit(optimizer.update)
        params = jnp.zeros(gradients.shape[1])
        state, oracle, expected = optimizer.init(params), Oracle(), np.zeros(gradients.shape[1])
        for g in gradients:
            updates, state = update(jnp.asarray(g), state, params)
            params = params + updates
            expected = expected + oracle.observe(g).scale() * (-0.1 * g)
            np.testing.assert_allclose(params, expected, atol=1e-12)


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.9999])
def test_in_the_long_run_the_counter_stands_still_near_its_limit(beta):
    """1 + beta n moves by less than float32 can tell when n is near 1 / (1 - beta)."""
    transformation = scale_by_conformity(beta=beta)
    state = transformation.init(jnp.zeros(1))
    state = jax.lax.fori_loop(0, 200_000, lambda _, s: transformation.update(jnp.ones(1), s)[1], state)
    limit = 1 / (1 - beta)
    # Half a unit in the last place of n, and 1 / (1 - beta) steps to forget it.
    assert abs(float(state.n) - limit) <= np.spacing(np.float32(limit)) * limit


def test_without_a_past_every_step_is_taken_in_full():
    assert np.array_equal(scales_over_time(stream(20), beta=0.0), np.ones((20, 40)))


def test_first_step_takes_every_element_in_full():
    # At t = 1 there is no variance, and n - 1 = 0: rounding noise over eps must not become a scale.
    gradients = np.random.default_rng(0).standard_normal((1, 100_000)).astype(np.float32)
    for eps in (1e-8, 0.0):
        assert np.array_equal(scales_over_time(gradients, eps=eps), np.ones((1, 100_000)))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_zero_gradients_have_scale_zero(measure, eps):
    assert np.array_equal(scales_over_time(np.zeros((5, 3), np.float32), measure, eps=eps), np.zeros((5, 3)))


compiled_student_t = jax.jit(partial(conformity_scale, eps=0.0, measure="student_t"))


@pytest.mark.parametrize("nu", [1, 1.2, 1.997, 2, 2.5, 4, 9, 30, 999, 1e5])
def test_student_t_is_students_distribution(nu):
    z = np.concatenate([np.linspace(0, 10, 1001), np.logspace(1, 6, 200)])
    with jax.enable_x64(True):
        # m_hat = z and sigma = 1: v_hat = z^2 + nu
        s = compiled_student_t(z, z**2 + nu, nu + 1.0)
        np.testing.assert_allclose(s, 2 * stats.t.cdf(z, nu) - 1, atol=1e-6)


def test_logistic_is_within_its_stated_error_of_the_normal_and_no_slope_is_nearer():
    z = np.linspace(0, 10, 100_001)
    normal = 2 * stats.norm.cdf(z) - 1

    def error(slope):
        return np.abs(np.tanh(slope * z / 2) - normal).max()

    assert 0.0185 < error(LOGISTIC_SLOPE) < 0.0190
    assert error(LOGISTIC_SLOPE) < min(error(LOGISTIC_SLOPE - 0.01), error(LOGISTIC_SLOPE + 0.01))
    with jax.enable_x64(True):
        s = conformity_scale(z, z**2 + 1, 2.0, eps=0.0, measure="logistic")
        np.testing.assert_allclose(s, np.tanh(LOGISTIC_SLOPE * z / 2), atol=1e-9)


def test_any_function_is_a_measure_and_may_ask_for_the_mean_absolute_value():
    def agreement(moments: Moments):
        return jnp.square(moments.m_hat / moments.a_hat)

    agreement.needs_mean_abs = True
    gradients = np.array([[1.0], [-1.0], [1.0]], np.float32)
    *_, scale = scales_over_time(gradients, agreement, beta=0.5)
    # Weights 1/4, 1/2, 1 over 7/4: the mean is 3/7, the mean absolute value 1.
    np.testing.assert_allclose(scale, [(3 / 7) ** 2], rtol=1e-6)


def test_eps_shuts_small_gradients_down_and_the_default_lets_them_through():
    gradients = 1e-7 * stream(1000)
    held_back, free = (scales_over_time(gradients, **options)[-1] for options in ({"eps": 1e-8}, {}))
    assert held_back.mean() < 0.9 * free.mean()


@pytest.mark.parametrize("moment_dtype", [None, "bfloat16"])
def test_by_default_learning_does_not_stop_however_small_gradients_are(moment_dtype):
    gradients = stream(100)
    usual, small, vanished = (
        scales_over_time(gradients * np.float32(size), moment_dtype=moment_dtype)[-1]
        for size in (1, 2.0**-50, 2.0**-90)
    )
    # Where float32 squares vanish, every step is taken in full, as without CProp.
    assert np.array_equal(vanished, gradients.any(axis=0))
    if moment_dtype is None:
        np.testing.assert_array_equal(small, usual)
    else:
        assert abs(small.mean() - usual.mean()) < 0.05  # rounded by other random bits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    m_hat, v_hat = jnp.asarray([0.5], dtype), jnp.asarray([2.0], dtype)
    scale = conformity_scale(m_hat, v_hat, 10.0)
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, conformity_scale(0.5, 2.0, 10.0)[None])


# Below 1e-19 the square of a float32 vanishes: a mean square cannot tell such a gradient from zero.
finite = st.floats(-1e6, 1e6, width=32).map(lambda g: 0.0 if abs(g) < 1e-16 else g)
# One length, for the same reason as below; a shorter history is one that begins with zeros.
histories = npst.arrays(np.float32, (12, 4), elements=finite)
betas = st.sampled_from([0.5, 0.999])
epsilons = st.sampled_from([0.0, 1e-8, 1e-3])
measures = st.sampled_from(list(MEASURES))
coefficients = st.sampled_from([0.1, 1.0, 3.0, math.inf])


@partial(jax.jit, static_argnames="measure")
def compiled_scale(history, beta, eps, c, measure):
    transformation = scale_by_conformity(beta, c, eps, measure)
    start = transformation.init(history[0])
    state, _ = jax.lax.scan(lambda s, g: (transformation.update(g, s)[1], None), start, history)
    return cprop_scales(state, measure)


def final_scale(history, *, beta=0.999, eps=0.0, c=1.0, measure="normal"):
    """The scale after a history; the settings are arrays, so that there is one program a measure to compile."""
    return np.asarray(compiled_scale(history, *jnp.array([beta, eps, c]), measure))


@given(histories, betas, epsilons, measures, coefficients)
@settings(max_examples=150, deadline=None)
def test_scale_is_within_bounds_whatever_the_gradients(history, beta, eps, measure, c):
    scale = final_scale(history, beta=beta, eps=eps, measure=measure, c=c)
    assert np.all((scale >= 0) & (scale <= 1)), scale


@given(histories, betas, measures)
@settings(max_examples=50, deadline=None)
def test_scale_does_not_depend_on_sign_or_without_eps_on_size(history, beta, measure):
    options = {"beta": beta, "eps": 0.0, "measure": measure}
    history = np.where(np.abs(history) < 1e-6, 0, history).astype(np.float32)
    scale = final_scale(history, **options)
    np.testing.assert_array_equal(scale, final_scale(-history, **options))
    np.testing.assert_array_equal(scale, final_scale(history * np.float32(2.0**-15), **options))


@given(histories, betas, epsilons)
@settings(max_examples=100, deadline=None)
def test_scale_is_within_1e5_of_the_oracle_whatever_the_gradients(history, beta, eps):
    oracle = Oracle(beta, eps=eps)
    for g in history:
        oracle.observe(g)
    np.testing.assert_allclose(final_scale(history, beta=beta, eps=eps), oracle.scale(), atol=1e-5)
