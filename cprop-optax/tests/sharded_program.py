"""A sharded step on eight devices; prints what the tests ask about. Started by ``test_sharding.py``."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cprop_optax import MEASURES, cprop, cprop_scales, scale_by_cprop_adam

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def optimizer(name):
    if name == "one mean square":
        return optax.chain(scale_by_cprop_adam(), optax.scale_by_learning_rate(0.1))
    if name == "bfloat16":
        return cprop(optax.adam(0.1), moment_dtype="bfloat16")
    return cprop(optax.adam(0.1), measure=name)


def collectives(compiled):
    """Operations of the compiled program that communicate."""
    return sorted(set(re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())))


def main():
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    layout = {"matrix": PartitionSpec("data", "model"), "vector": PartitionSpec("model"), "scalar": PartitionSpec()}
    layout = {name: NamedSharding(mesh, spec) for name, spec in layout.items()}
    generator = np.random.default_rng(0)
    shapes = {"matrix": (16, 8), "vector": (8,), "scalar": ()}
    draw = lambda: {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}  # noqa: E731
    start, gradients = draw(), [draw() for _ in range(5)]
    report = {}
    # What finds a collective must be able to find one.
    whole = jax.jit(lambda x: x / jnp.sum(x)).lower(jax.device_put(start["matrix"], layout["matrix"])).compile()
    report["a sum"] = {"collectives": collectives(whole)}
    for name in [*MEASURES, "bfloat16", "one mean square"]:
        tx = optimizer(name)
        params = jax.device_put(start, layout)
        state = tx.init(params)
        step = jax.jit(tx.update)
        compiled = step.lower(jax.device_put(gradients[0], layout), state, params).compile()
        alone, alone_state = jax.tree.map(jnp.asarray, start), tx.init(jax.tree.map(jnp.asarray, start))
        same_layout = like_parameters(state, params)
        for g in gradients:
            updates, state = step(jax.device_put(g, layout), state, params)
            params = optax.apply_updates(params, updates)
            updates, alone_state = step(jax.tree.map(jnp.asarray, g), alone_state, alone)
            alone = optax.apply_updates(alone, updates)
        same_layout = same_layout and like_parameters(state, params)
        scales = cprop_scales(state, name if name in MEASURES else "normal")
        report[name] = {
            "collectives": collectives(compiled),
            "sharded like the parameters": same_layout,
            "largest difference": max(float(np.abs(params[k] - alone[k]).max()) for k in params),
            "scales sharded": all(scales[k].sharding.is_equivalent_to(layout[k], scales[k].ndim) for k in layout),
        }
    json.dump(report, sys.stdout)


def like_parameters(state, params):
    """Whether every array of the state that has a parameter's shape lies as that parameter does."""
    lies = {p.shape: p.sharding for p in params.values() if p.ndim}
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    return len(arrays) >= 6 and all(x.sharding.is_equivalent_to(lies[x.shape], x.ndim) for x in arrays)


if __name__ == "__main__":
    main()
