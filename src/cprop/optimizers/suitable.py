"""Which optimizers cannot be wrapped, and which are scaled only in part."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop.optimizers.base import ConformityOptimizer
from cprop.sharding import local

__all__ = ["refuse_unsuitable", "warn_of_weights_in_state"]


def refuse_unsuitable(optimizer: Optimizer) -> None:
    """Raise if an optimizer cannot be wrapped, and say what to use instead."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"CProp wraps an optimizer, but got {type(optimizer).__name__}: "
            "write CProp(torch.optim.Adam(model.parameters(), lr=1e-3)), or use CProp.around(torch.optim.Adam) "
            "if you need a class"
        )
    if isinstance(optimizer, ConformityOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is already scaled by CProp: wrap the plain optimizer, or use this one directly"
        )
    saved = optimizer.state_dict()
    if not {"state", "param_groups"} <= set(saved):
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict() has {sorted(map(str, saved))} instead of 'state' and "
            "'param_groups', so CProp's statistics could not be saved: wrap the optimizer it is based on"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates its closure many times per step, so there is no single gradient "
            "whose conformity CProp could measure: use an optimizer that takes one gradient per step"
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise TypeError(
            f"{type(optimizer).__name__} uses different weights for training and evaluation, so CProp would not scale "
            "its actual steps: use it without CProp, or wrap the optimizer it is based on"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TypeError(
            f"{type(optimizer).__name__} has differentiable=True, but CProp's part of the step is not differentiable, "
            "so gradients through it would be wrong: set differentiable=False"
        )


def warn_of_weights_in_state(inner: Optimizer, moved: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Warn if an inner optimizer keeps weights in its state, where they are not scaled.

    Args:
        inner: the optimizer.
        moved: parameters after its step, and their values before it.
    """
    for p, before in islice(moved, 20):  # a few are enough, and each one synchronizes with its device
        for key, value in inner.state.get(p, {}).items():
            if correlation(value, before) > max(0.99, correlation(value, p.grad)):  # the gradient of w^2 is like w
                warnings.warn(
                    f"{type(inner).__name__} keeps weights in its state ({key!r}), which CProp does not scale: if its "
                    "steps start from them, as MADGRAD's do, CProp has no effect; use another optimizer",
                    stacklevel=5,
                )
                return


def correlation(value: Any, other: Tensor | None) -> float:
    """Correlation of a state entry with another tensor over the first elements; zero if it cannot be computed."""
    if not isinstance(value, Tensor) or other is None or value.shape != other.shape or value.is_meta:
        return 0.0
    pair = [local(x).detach().flatten()[:4096] for x in (value, other)]
    if pair[0].numel() < 8 or not all(map(Tensor.is_floating_point, pair)):
        return 0.0
    return float(torch.corrcoef(torch.stack([x.float() for x in pair]))[0, 1].nan_to_num())
