"""Which optimizers cannot be wrapped, and which are scaled only in part."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop.optimizers.base import ConformityOptimizer
from cprop.sharding import local
from cprop.statistics import PREFIX

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


def warn_of_weights_in_state(inner: Optimizer, updates: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Warn if an inner optimizer keeps weights in its state, where they are not scaled.

    Args:
        inner: the optimizer.
        updates: parameters after its step, their values before it, and their gradients.
    """
    key = None
    with suppress(Exception):  # a diagnostic must not stop the training, whatever the state consists of
        key = weights_in_state(inner, updates)
    if key is not None:
        warnings.warn(
            f"{type(inner).__name__} keeps weights in its state ({key!r}), which CProp does not scale: if its "
            "steps start from them, as MADGRAD's do, CProp has no effect; use another optimizer",
            stacklevel=5,
        )


def weights_in_state(inner: Optimizer, updates: Iterable[tuple[Tensor, Tensor, Tensor]]) -> str | None:
    """The first key of an optimizer's state that holds weights; arguments as above."""
    groups = {p: group for group in inner.param_groups for p in group["params"]}
    for p, before, g in islice(updates, 20):  # a few are enough, and each one synchronizes with its device
        for key, value in inner.state.get(p, {}).items():
            with suppress(Exception):  # a tensor of another class, such as a quantized one, may support next to nothing
                if not key.startswith(PREFIX) and holds_weights(value, before, g, groups[p]):
                    return str(key)
    return None


def holds_weights(value: Any, before: Tensor, g: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a state entry resembles the weights, and the gradient and its L2 term do not explain why.

    The gradient of w^2 is like w, and so is the L2 term where the gradient is zero or small.
    """
    if not isinstance(value, Tensor) or value.shape != before.shape or not value.is_floating_point():
        return False
    kept, weights, gradient = map(first_elements, (value, before, g))
    if correlation(kept, weights) < 0.99 or correlation(kept, gradient) > 0.99:
        return False
    copied = bool((kept - weights).norm() <= 1e-3 * weights.norm())
    # MARS, for one, has its weight decay under another name.
    decay = sum(float(x) for name, x in group.items() if name.startswith("weight_decay") and x is not None)
    return copied or correlation(kept, gradient + decay * weights) < 0.99


def first_elements(x: Tensor) -> Tensor:
    """A few elements as a vector, in float64."""
    return local(x).detach().flatten()[:4096].double()


def correlation(x: Tensor, y: Tensor) -> float:
    """Correlation of two vectors; zero if one of them is constant, or too short to tell."""
    if len(x) < 8 or x.min() == x.max() or y.min() == y.max():
        return 0.0
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1].nan_to_num())
