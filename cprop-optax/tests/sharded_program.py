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

NAMES = [*MEASURES, "bfloat16", "one mean square"]
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

    def draw():
        return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    start, gradients = draw(), [draw() for _ in range(5)]
    params = jax.device_put(start, layout)
    # What finds a collective must be able to find one.
    report = {
        "a sum": {"collectives": collectives(jax.jit(lambda x: x / jnp.sum(x)).lower(params["matrix"]).compile())}
    }
    for name in NAMES:
        tx = optimizer(name)
        state = tx.init(params)
        before = like_parameters(state, params)
        step = jax.jit(tx.update).lower(params, state, params).compile()
        for g in gradients:
            updates, state = step(jax.device_put(g, layout), state, params)
        report[name] = {
            "collectives": collectives(step),
            "sharded like the parameters": before and like_parameters(state, params),
            "updates": {k: np.asarray(u).tolist() for k, u in updates.items()},
        }
    scales = cprop_scales(tx.init(params))
    report["scales"] = all(scales[k].sharding.is_equivalent_to(layout[k], scales[k].ndim) for k in layout)
    # The numbers of one device, for the two kinds of arithmetic that are.
    for name in ("normal", "bfloat16"):
        tx = optimizer(name)
        state, update = tx.init(start), jax.jit(tx.update)
        for g in gradients:
            updates, state = update(g, state, start)
        sharded = report[name]["updates"]
        report[name]["largest difference"] = max(
            float(np.abs(u - np.array(sharded[k])).max()) for k, u in updates.items()
        )
    json.dump(report, sys.stdout)


def like_parameters(state, params):
    """Whether every array of the state that has a parameter's shape lies as that parameter does."""
    lies = {p.shape: p.sharding for p in params.values() if p.ndim}
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    return len(arrays) >= 6 and all(x.sharding.is_equivalent_to(lies[x.shape], x.ndim) for x in arrays)


if __name__ == "__main__":
    main()
