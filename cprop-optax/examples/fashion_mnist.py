"""The paper's fully-connected network on Fashion-MNIST, in plain JAX: ``python examples/fashion_mnist.py``.

Data are read from ``--data FOLDER`` or the folder that ``CPROP_LAB_DATA`` names, in which there is a folder
``fashion_mnist``; without either, the public data set is downloaded. Needs ``datasets`` and ``pillow``.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cprop_optax

SIZES = (784, 300, 100, 10)
BATCH = 32


class Split(NamedTuple):
    """Images as rows of bytes, and their labels."""

    images: jax.Array
    labels: jax.Array


class Row(NamedTuple):
    """A point of the curves; losses are over the whole splits."""

    step: int
    train_loss: float
    test_loss: float
    accuracy: float
    mean_scale: float | None


def read(data: Path | None) -> tuple[Split, Split]:
    """The training and the test images."""
    from datasets import load_dataset

    root = data or os.environ.get("CPROP_LAB_DATA")
    address = str(Path(root) / "fashion_mnist") if root else "zalando-datasets/fashion_mnist"

    def split(name: str) -> Split:
        rows = load_dataset(address, split=name)
        images = np.stack([np.asarray(image) for image in rows["image"]])
        return Split(jnp.asarray(images.reshape(len(images), -1)), jnp.asarray(rows["label"][:]))

    return split("train"), split("test")


def network(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Weights and biases drawn as PyTorch's linear layers draw them: within one over the root of the inputs."""
    layers = []
    for inputs, outputs in pairwise(SIZES):
        key, for_weight, for_bias = jax.random.split(key, 3)
        draw = partial(jax.random.uniform, minval=-(inputs**-0.5), maxval=inputs**-0.5)
        layers.append({"weight": draw(for_weight, (inputs, outputs)), "bias": draw(for_bias, (outputs,))})
    return layers


def logits(params: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """What the network says about images in bytes."""
    x = images.astype(jnp.float32) / 255
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ params[-1]["weight"] + params[-1]["bias"]


def loss(params: list[dict[str, jax.Array]], split: Split) -> jax.Array:
    """The cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, split.images), split.labels).mean()


def train(
    optimizer: optax.GradientTransformation, data: tuple[Split, Split], seed: int, iterations: int, every: int
) -> list[Row]:
    """One run, and its curves."""
    training, _ = data
    for_network, for_batches = jax.random.split(jax.random.key(seed))
    params = network(for_network)
    state = optimizer.init(params)

    # The data are arguments: an array that a compiled function finds by itself is a constant to be folded.
    @jax.jit
    def advance(params: Any, state: Any, training: Split, batches: jax.Array) -> tuple[Any, Any]:
        """A step for each row of indices."""

        def step(carry: tuple[Any, Any], batch: jax.Array) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            grads = jax.grad(loss)(params, Split(training.images[batch], training.labels[batch]))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), batches)[0]

    @jax.jit
    def evaluate(params: Any, training: Split, test: Split) -> tuple[jax.Array, ...]:
        found = logits(params, test.images).argmax(1) == test.labels
        return loss(params, training), loss(params, test), found.mean()

    rows = []
    batches = order(for_batches, len(training.labels), iterations)
    for start in range(0, iterations, every):
        params, state = advance(params, state, training, batches[start : start + every])
        rows.append(Row(start + every, *map(float, evaluate(params, *data)), mean_scale(state)))
    return rows


def order(key: jax.Array, size: int, iterations: int) -> jax.Array:
    """Which images each iteration sees: all of them once an epoch, in random order."""
    an_epoch = size // BATCH
    epochs = [
        jax.random.permutation(k, size)[: an_epoch * BATCH] for k in jax.random.split(key, -(-iterations // an_epoch))
    ]
    return jnp.concatenate(epochs).reshape(-1, BATCH)[:iterations]


def mean_scale(state: Any) -> float | None:
    """The mean of CProp's scales, if there are any."""
    if not isinstance(state, cprop_optax.CPropState):
        return None
    scales = jax.tree.leaves(cprop_optax.cprop_scales(state))
    return float(sum(s.sum() for s in scales) / sum(s.size for s in scales))


def main() -> None:
    """Train once from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds fashion_mnist (default: $CPROP_LAB_DATA)")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="iterations between two rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="Adam without CProp")
    arguments = parser.parse_args()
    adam = optax.adam(1e-3)
    optimizer = adam if arguments.plain else cprop_optax.cprop(adam)
    for row in train(optimizer, read(arguments.data), arguments.seed, arguments.iterations, arguments.every):
        scale = "" if row.mean_scale is None else f"   mean scale {row.mean_scale:.2f}"
        print(
            f"{row.step:6d}   training loss {row.train_loss:.3f}   test loss {row.test_loss:.3f}   "
            f"accuracy {row.accuracy:.3f}{scale}"
        )


if __name__ == "__main__":
    main()
