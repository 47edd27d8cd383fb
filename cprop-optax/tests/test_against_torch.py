"""Step by step equal to the PyTorch library, from the same gradients.

``cprop(inner)`` is the twin of the wrapper ``cprop.CProp(optimizer)``: both scale all that the inner optimizer
does, decay included. A chain with the decay outside is the twin of the natives.
"""

import cprop
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from streams import gradients, parameters

from cprop_optax import MEASURES, scale_by_cprop_adam
from cprop_optax import cprop as around
from cprop_optax import cprop_scales as scales_of

STEPS = 200
LR = 0.01
DECAY = 0.1


def l2(inner):
    return optax.chain(optax.add_decayed_weights(DECAY), inner)


def with_decay_outside(scaled):
    return optax.chain(scaled, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(LR))


WRAPPED = {
    "sgd": (lambda: optax.sgd(LR), lambda ps: torch.optim.SGD(ps, lr=LR)),
    "sgd, momentum": (lambda: optax.sgd(LR, 0.9), lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9)),
    "sgd, momentum, L2": (
        lambda: l2(optax.sgd(LR, 0.9)),
        lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, weight_decay=DECAY),
    ),
    "adam": (lambda: optax.adam(LR), lambda ps: torch.optim.Adam(ps, lr=LR)),
    "adam, L2": (lambda: l2(optax.adam(LR)), lambda ps: torch.optim.Adam(ps, lr=LR, weight_decay=DECAY)),
    "adamw": (
        lambda: optax.adamw(LR, weight_decay=DECAY),
        lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=DECAY),
    ),
    "rmsprop": (
        lambda: optax.rmsprop(LR, decay=0.99, eps=1e-8, eps_in_sqrt=False),
        lambda ps: torch.optim.RMSprop(ps, lr=LR, alpha=0.99),
    ),
}

NATIVE = {
    "sgd, momentum": (
        lambda: around(optax.sgd(LR, 0.9)),
        lambda ps: cprop.CPropSGD(ps, lr=LR, momentum=0.9),
    ),
    "adam": (lambda: around(optax.adam(LR)), lambda ps: cprop.CPropAdam(ps, lr=LR)),
    "adam, one mean square": (
        lambda: optax.chain(scale_by_cprop_adam(), optax.scale_by_learning_rate(LR)),
        lambda ps: cprop.CPropAdam(ps, lr=LR),
    ),
    "adamw": (
        lambda: with_decay_outside(around(optax.scale_by_adam())),
        lambda ps: cprop.CPropAdamW(ps, lr=LR, weight_decay=DECAY),
    ),
    "adamw, one mean square": (
        lambda: with_decay_outside(scale_by_cprop_adam()),
        lambda ps: cprop.CPropAdamW(ps, lr=LR, weight_decay=DECAY),
    ),
    "rmsprop": (
        lambda: around(optax.rmsprop(LR, decay=0.99, eps=1e-8, eps_in_sqrt=False)),
        lambda ps: cprop.CPropRMSprop(ps, lr=LR, alpha=0.99),
    ),
}


def torch_trajectory(make, dtype):
    """Parameters and scales after each step of the PyTorch library."""
    params = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in parameters(dtype).items()}
    optimizer = make(list(params.values()))
    moved, scales = [], []
    for g in gradients(STEPS, dtype):
        for name, p in params.items():
            p.grad = torch.tensor(g[name])
        optimizer.step()
        by_parameter = {id(p): scale for p, scale in optimizer.scales()}
        moved.append({name: p.detach().numpy().copy() for name, p in params.items()})
        scales.append({name: by_parameter[id(p)].numpy().copy() for name, p in params.items()})
    return stacked(moved), stacked(scales)


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def assert_equal_step_by_step(ours, theirs, dtype, measure="normal", tolerance=None):
    """Parameters and scales after each of 200 steps.

    In float32 each step starts from torch's parameters, so that it shows its own difference, and not the sum of all
    roundings before it; the statistics run on through all steps.
    """
    tolerance = tolerance or {np.float64: 1e-12, np.float32: 1e-6}[dtype]
    expected, expected_scales = torch_trajectory(theirs, dtype)
    with jax.enable_x64(dtype == np.float64):
        start = jax.tree.map(jnp.asarray, parameters(dtype))
        optimizer = ours()

        def step(carry, inputs):
            params, state = carry
            grads, torch_params = inputs
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            after = torch_params if dtype == np.float32 else params
            return (after, state), (params, scales_of(state, measure))

        inputs = jax.tree.map(jnp.asarray, (stacked(list(gradients(STEPS, dtype))), expected))
        _, outputs = jax.lax.scan(step, (start, optimizer.init(start)), inputs)
        params, scales = jax.tree.map(np.asarray, outputs)
    for name in start:
        assert params[name].dtype == scales[name].dtype == dtype
        np.testing.assert_allclose(params[name], expected[name], atol=tolerance, rtol=0)
        np.testing.assert_allclose(scales[name], expected_scales[name], atol=5 * tolerance, rtol=0)
    assert scales["matrix"][-1].max() > 0.9, "everything was scaled to nothing"
    assert scales["matrix"][-1, 1:].min() < 0.5, "nothing was scaled"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", WRAPPED)
def test_around_an_optimizer_it_equals_the_wrapper(name, dtype):
    inner, torch_inner = WRAPPED[name]
    assert_equal_step_by_step(lambda: around(inner()), lambda ps: cprop.CProp(torch_inner(ps)), dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NATIVE)
def test_with_the_decay_outside_it_equals_the_natives(name, dtype):
    assert_equal_step_by_step(*NATIVE[name], dtype)


@pytest.mark.parametrize("measure", MEASURES)
def test_settings_and_measures_mean_the_same(measure):
    # The two integrate Student's distribution by different points, each within its stated error.
    settings = {"beta": 0.97, "c": 1.7, "eps": 1e-4, "measure": measure}
    assert_equal_step_by_step(
        lambda: around(optax.adam(LR), **settings),
        lambda ps: cprop.CProp(torch.optim.Adam(ps, lr=LR), **settings),
        np.float64,
        measure,
        tolerance=1e-4 if measure == "student_t" else None,
    )
