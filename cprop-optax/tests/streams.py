"""Gradients that the tests feed to both libraries and to the oracle."""

import numpy as np

SHAPES = {"matrix": (5, 7), "vector": (3,), "scalar": ()}


def parameters(dtype=np.float32):
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(steps, dtype=np.float32, seed=1):
    """A signal of either sign in noise of its own size for each element; some elements are always zero."""
    generator = np.random.default_rng(seed)
    signal = {name: 0.3 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    noise = {name: np.exp(generator.standard_normal(shape)) for name, shape in SHAPES.items()}
    for _ in range(steps):
        tree = {name: signal[name] + noise[name] * generator.standard_normal(shape) for name, shape in SHAPES.items()}
        tree["matrix"][0, :2] = 0.0
        yield {name: np.asarray(g, dtype) for name, g in tree.items()}


def stream(steps=500, width=40, seed=0):
    """The same for one vector, as one float32 array."""
    generator = np.random.default_rng(seed)
    signal = np.linspace(-0.3, 0.3, width)
    return (signal + generator.standard_normal((steps, width))).astype(np.float32)
