"""Fashion-MNIST's fully-connected network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

__all__ = ["fully_connected"]


def fully_connected(sizes: Sequence[int] = (784, 300, 100, 10)) -> nn.Sequential:
    """Linear layers with ReLU after each but the last (appendix, "Fashion MNIST's Fully-connected architecture").

    Args:
        sizes: the number of inputs, of each layer's units, and of classes.

    Example:
        >>> import torch
        >>> fully_connected()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
