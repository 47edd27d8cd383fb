"""The learning rates the paper chose (appendix E), which are also where our own searches start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cprop_lab.run.recipes import RECIPES

__all__ = ["PAPER", "rate"]

PAPER: Final[Mapping[str, Mapping[str, float]]] = {
    "fmnist-fc": {"sgd": 0.1, "adam": 1e-3, "rmsprop": 1e-3},
    "fmnist-cnn": {"sgd": 0.3, "adam": 3e-3, "rmsprop": 3e-3},
    "cifar100-vgg": {"sgd": 0.01, "adam": 1e-4, "rmsprop": 1e-4},
    "cifar100-resnet": {"sgd": 0.03, "adam": 1e-4, "rmsprop": 1e-4},
    "tiny-imagenet-vgg": {"sgd": 0.01, "adam": 3e-5},
    "tiny-imagenet-resnet": {"sgd": 0.01, "adam": 1e-4},
    "ptb-lstm": {"sgd": 30.0, "adam": 1e-3},
    "ptb-lstm-dropout": {"sgd": 30.0, "adam": 3e-3},
}

GUESSES: Final[Mapping[str, Mapping[str, float]]] = {
    "ptb-lstm-small": {"sgd": 10.0, "adam": 3e-3},
    "ptb-transformer": {"sgd": 1.0, "adam": 1e-3},
    "ptb-gpt": {"sgd": 0.3, "adam": 1e-3},
}
"""Where searches start on the workloads beyond the paper."""


def rate(workload: str, base: str, batch_size: int = 32) -> float:
    """The paper's learning rate for an optimizer, or a guess where the paper has none.

    "AMSGrad shares Adam's learning rate. AdaBound shares the start learning rate with Adam." With smaller batches SGD's
    rate falls in proportion, and Adam's was selected anew (figure 22).

    Example:
        >>> rate("fmnist-cnn", "sgd", batch_size=8), rate("fmnist-cnn", "adam", batch_size=8)
        (0.075, 0.001)
    """
    known = {**PAPER, **GUESSES}.get(workload, {})
    base = dict.fromkeys(("amsgrad", "adabound", "adamw", "nadamw", "cautious-adamw"), "adam").get(base, base)
    found = known.get(base, RECIPES[base].guess)
    if batch_size == 32:
        return found
    if base == "sgd":
        return found * batch_size / 32
    return 1e-3 if workload == "fmnist-cnn" and base == "adam" and batch_size <= 8 else found
