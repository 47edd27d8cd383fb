"""The suite that optax runs over its own optimizers, over CProp around some of them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streams import gradients, parameters

import cprop_optax
from cprop_optax import ConformityState, cprop, cprop_scales, scale_by_conformity, scale_by_cprop_adam

OPTIMIZERS = {
    "sgd": lambda: cprop(optax.sgd(0.05)),
    "sgd, momentum": lambda: cprop(optax.sgd(0.02, momentum=0.9)),
    "adam": lambda: cprop(optax.adam(0.03)),
    "adamw, bfloat16 moments": lambda: cprop(optax.adamw(0.03), moment_dtype="bfloat16"),
    "rmsprop, relative rate": lambda: cprop(optax.rmsprop(0.05), measure="relative_rate"),
    "lion, clipped": lambda: cprop(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.02))),
    "in a chain": lambda: optax.chain(scale_by_conformity(c=2.0), optax.sgd(0.05)),
    "one mean square": lambda: optax.chain(scale_by_cprop_adam(), optax.scale_by_learning_rate(0.03)),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def tree(dtype=jnp.float32):
    return {name: jnp.asarray(p, dtype) for name, p in parameters().items()}


def run(optimizer, params, grads, jit=True):
    """Parameters and state after a list of gradients."""
    state = optimizer.init(params)
    update = jax.jit(optimizer.update) if jit else optimizer.update
    for g in grads:
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_trees_equal(a, b, atol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol, rtol=0)


@every_optimizer
def test_converges(name):
    """On a badly scaled parabola seen through noise; the noise is what CProp is for."""
    target = jnp.array([1.0, -2.0, 0.5])

    def loss(params):
        return jnp.sum(jnp.array([1.0, 0.3, 3.0]) * (params - target) ** 2)

    optimizer = OPTIMIZERS[name]()

    @jax.jit
    def train(key):
        def step(carry, key):
            params, state = carry
            grads = jax.grad(loss)(params) + 0.1 * jax.random.normal(key, params.shape)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.zeros(3)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, 1500))
        return params

    np.testing.assert_allclose(train(jax.random.key(0)), target, atol=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@every_optimizer
def test_dtypes_stay_as_they_are(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        optimizer, params = OPTIMIZERS[name](), tree(dtype)
        state = optimizer.init(params)
        grads = jax.tree.map(jnp.ones_like, params)
        updates, new_state = jax.eval_shape(optimizer.update, grads, state, params)

        def types(tree):
            return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)

        assert types(updates) == types(params)
        assert types(new_state) == types(state)
        conformity = found(state)
        wanted = "bfloat16" if "bfloat16" in name else "float64" if dtype == "float64" else "float32"
        assert {str(x.dtype) for x in jax.tree.leaves((conformity.m_hat, conformity.v_hat))} == {wanted}


def found(state):
    def is_ours(x):
        return isinstance(x, ConformityState)

    (one,) = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    return one


@every_optimizer
def test_a_second_call_does_not_compile_again(name):
    optimizer, params = OPTIMIZERS[name](), tree()
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for g in gradients(3):
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1


def test_with_and_without_jit_agree():
    grads = list(gradients(5))
    optimizer = OPTIMIZERS["adam"]()
    assert_trees_equal(run(optimizer, tree(), grads), run(optimizer, tree(), grads, jit=False), atol=1e-5)


def test_scan_agrees_with_a_loop():
    grads = list(gradients(20))
    optimizer = OPTIMIZERS["adam"]()

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    scanned, _ = jax.lax.scan(step, (tree(), optimizer.init(tree())), stacked)
    assert_trees_equal(scanned, run(optimizer, tree(), grads), atol=1e-6)


def test_vmap_over_settings_and_gradients_trains_each_member_by_itself():
    settings = [(0.9, 1.0), (0.999, 2.0)]
    histories = [list(gradients(20, seed=seed)) for seed in (1, 2)]

    def train(beta, c, grads):
        optimizer = cprop(optax.adam(0.1), beta=beta, c=c)

        def step(carry, g):
            params, state = carry
            updates, state = optimizer.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (tree(), optimizer.init(tree())), grads)[0]

    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads) for grads in histories]
    both = jax.vmap(train)(*jnp.array(settings).T, jax.tree.map(lambda a, b: jnp.stack([a, b]), *stacked))
    for i, ((beta, c), grads) in enumerate(zip(settings, histories, strict=True)):
        # A setting as a float32 array has fewer digits of 1 - beta than a Python number.
        alone = run(cprop(optax.adam(0.1), beta=beta, c=c), tree(), grads)
        assert_trees_equal(jax.tree.map(lambda x, i=i: x[i], both), alone, atol=2e-3 if i else 1e-4)


def test_accumulated_gradients_are_one_gradient():
    grads = list(gradients(20))
    params, state = run(optax.MultiSteps(cprop(optax.adam(0.1)), every_k_schedule=4), tree(), grads)
    means = [jax.tree.map(lambda *g: np.mean(g, axis=0), *grads[i : i + 4]) for i in range(0, 20, 4)]
    expected, expected_state = run(cprop(optax.adam(0.1)), tree(), means)
    assert_trees_equal(params, expected, atol=1e-5)
    assert int(found(state).count) == int(found(expected_state).count) == 5


def test_masked_leaves_are_left_alone_and_cost_nothing():
    mask = {"matrix": True, "vector": False, "scalar": True}
    optimizer = optax.masked(cprop(optax.adam(0.1)), mask)
    state = optimizer.init(tree())
    (g,) = gradients(1)
    updates, state = optimizer.update(jax.tree.map(jnp.asarray, g), state, tree())
    np.testing.assert_array_equal(updates["vector"], g["vector"])
    np.testing.assert_allclose(np.abs(updates["matrix"])[1:], 0.1, rtol=1e-4)
    assert sorted(x.shape for x in jax.tree.leaves(found(state).m_hat)) == [(), (5, 7)]


def test_different_settings_for_different_leaves():
    grads = list(gradients(30))
    optimizer = optax.multi_transform(
        {"scaled": cprop(optax.sgd(0.1)), "plain": optax.sgd(0.1)},
        {"matrix": "scaled", "vector": "plain", "scalar": "scaled"},
    )
    params, _ = run(optimizer, tree(), grads)
    scaled, _ = run(cprop(optax.sgd(0.1)), tree(), grads)
    plain, _ = run(optax.sgd(0.1), tree(), grads)
    np.testing.assert_array_equal(params["matrix"], scaled["matrix"])
    np.testing.assert_array_equal(params["vector"], plain["vector"])
    assert not np.array_equal(scaled["vector"], plain["vector"])


def test_missing_leaves_are_allowed_as_in_optax():
    params = {"trained": jnp.ones(3), "static": None}
    updates, _ = (optimizer := cprop(optax.adam(0.1))).update(params, optimizer.init(params), params)
    assert updates["static"] is None


@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1), optax.rmsprop(0.1)])
@pytest.mark.parametrize("c", [math.inf, jnp.inf * jnp.ones([])], ids=["number", "array"])
def test_infinite_c_is_the_inner_optimizer_to_the_bit(inner, c):
    grads = list(gradients(8))
    ours, state = run(cprop(inner, c=c), tree(), grads, jit=False)
    assert_trees_equal(ours, run(inner, tree(), grads, jit=False)[0])
    assert all(np.all(scale == 1) for scale in jax.tree.leaves(cprop_scales(state)))


def test_one_mean_square_is_cprop_around_adam():
    grads = list(gradients(50))
    settings = {"c": 1.5, "measure": "logistic"}
    ours, state = run(scale_by_cprop_adam(0.8, 0.99, 1e-6, conformity_eps=1e-7, **settings), tree(), grads)
    theirs, expected = run(cprop(optax.scale_by_adam(0.8, 0.99, 1e-6), beta=0.99, eps=1e-7, **settings), tree(), grads)
    assert_trees_equal(ours, theirs, atol=1e-4)  # the sum of fifty updates of size one
    assert_trees_equal(cprop_scales(state, "logistic"), cprop_scales(expected, "logistic"), atol=1e-6)
    arrays, more = (sum(x.size > 1 for x in jax.tree.leaves(s)) for s in (state, expected))
    assert (arrays, more) == (6, 8)


def test_extra_arguments_reach_the_inner_optimizer():
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=0, cooldown=0, factor=0.5))
    optimizer = cprop(inner, c=math.inf)
    params = jnp.ones(2)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(params, state, params, value=jnp.array(1.0))
    np.testing.assert_allclose(updates, -0.1 * 0.5 * params)


@pytest.mark.parametrize("name", ["adam", "in a chain", "one mean square"])
def test_an_element_that_is_no_number_counts_as_zero(name):
    clean, spoilt = list(gradients(8)), list(gradients(8))
    for t, bad in enumerate([np.nan, np.inf, -np.inf, 1e30], 2):
        clean[t]["matrix"][2, t], spoilt[t]["matrix"][2, t] = 0.0, bad
    assert_trees_equal(run(OPTIMIZERS[name](), tree(), spoilt), run(OPTIMIZERS[name](), tree(), clean))


def test_scales_are_those_of_the_last_update():
    optimizer = cprop(optax.sgd(1.0), beta=0.9, c=1.3, eps=1e-4, measure="logistic")
    grads = list(gradients(10))
    params, state = run(optimizer, tree(), grads[:-1])
    updates, state = optimizer.update(jax.tree.map(jnp.asarray, grads[-1]), state, params)
    expected = jax.tree.map(lambda g, s: -g * s, grads[-1], cprop_scales(state, "logistic"))
    assert_trees_equal(updates, expected, atol=1e-7)


def test_before_the_first_step_scales_are_zero():
    state = cprop(optax.adam(1e-3)).init(tree())
    assert all(np.all(scale == 0) for scale in jax.tree.leaves(cprop_scales(state)))


def test_scales_are_found_wherever_the_state_is():
    grads = list(gradients(3))
    nested = optax.inject_hyperparams(partial(cprop, optax.adam(0.1)))(c=1.0)
    for optimizer in (optax.chain(optax.clip(1e9), cprop(optax.adam(0.1))), nested):
        _, state = run(optimizer, tree(), grads)
        assert jax.tree.structure(cprop_scales(state)) == jax.tree.structure(tree())


def test_donated_buffers_are_reused():
    optimizer, params = OPTIMIZERS["adam"](), jnp.ones((64, 64))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.tree.map(jnp.copy, optimizer.init(params))
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size > 1}
    params, state = step(params, state, jnp.ones((64, 64)))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size > 1} == before


def test_the_public_names_are_these():
    assert set(cprop_optax.__all__) <= set(dir(cprop_optax))
