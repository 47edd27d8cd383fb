"""Statistics in bfloat16, and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from streams import gradients, parameters, stream

from cprop_optax import cprop, cprop_scales, scale_by_conformity, scale_by_cprop_adam
from cprop_optax._storage import round_stochastically


def test_rounding_is_to_a_neighbour_and_right_on_average():
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    rounded = np.asarray(round_stochastically(jnp.asarray(x), jnp.arange(3000)[:, None]), np.float32)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    assert np.all(np.abs(rounded - x) < spacing)
    # Five standard errors of a mean of 3,000, each off by at most a spacing.
    assert np.all(np.abs(rounded.mean(0) - x) < 5 * 0.5 * spacing / np.sqrt(3000))


@pytest.mark.parametrize("x", [0.0, 1.0, -2.5, 1.0e-30])
def test_what_fits_is_not_changed(x):
    exact = jnp.asarray(x, jnp.bfloat16)
    counts = jnp.arange(100)
    assert jnp.all(round_stochastically(jnp.full(100, exact.astype(jnp.float32)), counts) == exact)


def test_equal_numbers_are_rounded_independently():
    rounded = round_stochastically(jnp.full((64, 64), 1 + 2.0**-8), jnp.asarray(7)).astype(jnp.float32)
    # Halfway between two neighbours: five standard errors of a share of 4,096.
    assert abs(jnp.mean(rounded == 1.0) - 0.5) < 5 * 0.5 / 64


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_stays_nan(bits):
    nan = jax.lax.bitcast_convert_type(jnp.full(100, bits, jnp.uint32), jnp.float32)
    assert jnp.all(jnp.isnan(round_stochastically(nan, jnp.arange(100))))


def last_state(gradients, **options):
    transformation = scale_by_conformity(**options)
    start = transformation.init(jnp.asarray(gradients[0]))
    return jax.lax.scan(lambda s, g: (transformation.update(g, s)[1], None), start, jnp.asarray(gradients))[0]


def test_scales_from_bfloat16_are_near_those_from_float32():
    history = stream(3000, 200)
    lean, full = (last_state(history, moment_dtype=dtype) for dtype in ("bfloat16", None))
    assert lean.m_hat.dtype == lean.v_hat.dtype == jnp.bfloat16
    errors = cprop_scales(lean) - cprop_scales(full)
    assert np.sqrt(np.mean(errors**2)) < 0.05
    assert abs(np.mean(errors)) < 0.01


def test_means_in_bfloat16_move_although_a_step_is_below_their_resolution():
    # From a mean of one towards zero, by a thousandth of it a step: to the nearest it would stay at one.
    history = np.concatenate([np.ones((1, 100)), np.zeros((1500, 100))]).astype(np.float32)
    full, lean = (last_state(history, moment_dtype=dtype).v_hat.astype(jnp.float32) for dtype in (None, "bfloat16"))
    np.testing.assert_allclose(lean.mean(), full.mean(), rtol=0.2)


def test_first_step_is_taken_in_full_in_bfloat16_too():
    transformation = scale_by_conformity(moment_dtype="bfloat16")
    g = jnp.asarray(stream(1)[0])
    updates, state = transformation.update(g, transformation.init(g))
    np.testing.assert_array_equal(updates, g)
    np.testing.assert_array_equal(cprop_scales(state), jnp.ones_like(g))


OPTIMIZERS = {
    "cprop(adam)": lambda: cprop(optax.adam(0.1)),
    "bfloat16, relative rate": lambda: cprop(optax.adam(0.1), moment_dtype="bfloat16", measure="relative_rate"),
    "injected": lambda: optax.inject_hyperparams(cprop)(optax.adam(0.1), c=2.0),
    "one mean square": lambda: optax.chain(scale_by_cprop_adam(), optax.scale_by_learning_rate(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumed_from_an_orbax_checkpoint_equals_an_unbroken_one_to_the_bit(name, tmp_path):
    optimizer = OPTIMIZERS[name]()

    @jax.jit
    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state

    grads = list(gradients(12))
    params = jax.tree.map(jnp.asarray, parameters())
    state = optimizer.init(params)
    for g in grads[:7]:
        params, state = step(params, state, g)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", (params, state))
    for g in grads[7:]:
        params, state = step(params, state, g)

    fresh = jax.tree.map(jnp.zeros_like, parameters())
    template = jax.eval_shape(lambda: (fresh, optimizer.init(fresh)))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "checkpoint", template)
    assert jax.tree.structure(restored) == jax.tree.structure((params, state))
    for g in grads[7:]:
        restored = step(*restored, g)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves((params, state)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
