"""Fashion-MNIST's fully-connected network (appendix A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

__all__ = ["fully_connected"]


def fully_connected(sizes: Sequence[int] = (784, 300, 100, 10)) -> nn.Sequential:
    """Layers of these sizes, with ReLU after each but the last.

    Example:
        >>> sum(p.numel() for p in fully_connected().parameters())
        266610
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
