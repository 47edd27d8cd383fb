"""A parameter's state: how it is allocated, counted, and read from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cprop import checkpoint
from cprop.arithmetic import Number, is_fake, plain_number
from cprop.measures import measure_name
from cprop.statistics import EARLIER, STEP
from cprop.storage import allocate, restore

__all__ = ["count", "count_up", "foreign_state", "new_counter", "new_state", "portable", "read_state"]

COUNTERS: Final = ("step", STEP, EARLIER)


def portable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With names of callable measures and numbers of Python, so that the file loads with ``weights_only=True``."""
    groups = [{key: plain_setting(value) for key, value in group.items()} for group in state_dict["param_groups"]]
    for group in groups:
        group["cprop_measure"] = measure_name(group["cprop_measure"])
    return {**state_dict, "param_groups": groups}


def plain_setting(setting: Any) -> Any:
    """A setting with numbers of Python, also in a list or a tuple, such as Adam's betas."""
    return type(setting)(map(plain_setting, setting)) if type(setting) in (list, tuple) else plain_number(setting)


def new_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Zero state with the shape, layout and sharding of a parameter, in the group's format."""
    return allocate(p, group["cprop_state_dtype"])


def new_counter(key: str, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A step counter: on the CPU, where reading it is cheap, unless the group is capturable.

    CProp's own is exact, because stochastic rounding needs another number in every step; float32 ends at 2**24. The
    others are as torch has them.
    """
    device = p.device if group.get("capturable") else torch.device("cpu")
    exact = key == STEP and device.type != "mps"  # which has no float64
    dtype = torch.float64 if exact else torch.float32
    if group.get("capturable"):
        return torch.zeros((), dtype=dtype, device=device)
    return torch.tensor(0.0, dtype=dtype, device=device)  # a fake tensor made so can be read, unlike zeros


def read_state(key: str, saved: Any, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A saved counter or state tensor, in the form of :func:`new_counter` or :func:`new_state`."""
    if key in COUNTERS:
        counter = new_counter(key, p, group)
        return counter.fill_(checkpoint.check_counter(key, saved))
    tensor = checkpoint.check_tensor(key, saved, p.shape)
    return restore(tensor, p, group["cprop_state_dtype"])


def foreign_state(value: Any, p: Tensor) -> Any:
    """A copy of another tool's state entry, on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach().to(p.device if value.dim() else value.device, copy=True)
    return copy.deepcopy(value)


ONE: Final = torch.tensor(1.0, device="cpu")  # even if the default device is another one


def count_up(counters: list[Tensor], by: float = 1.0) -> None:
    """Add one to each counter, or another number."""
    if counters and not torch.compiler.is_compiling() and is_fake(counters[0]):
        for counter in counters:  # a fake counter can still be read after this, but not after foreach
            counter.add_(by)
    elif counters and counters[0].is_cpu and not torch.compiler.is_compiling():
        # A Python number would be converted to a tensor for each counter, which takes three times as long.
        torch._foreach_add_(counters, ONE, alpha=by)
    else:
        for dtype in {counter.dtype for counter in counters}:
            torch._foreach_add_([counter for counter in counters if counter.dtype == dtype], by)


def count(counter: Tensor, group: Mapping[str, Any]) -> Number:
    """A counter's value: a number if the counter is on the CPU, or a float32 tensor if the group is capturable.

    (In float64, it would change the dtype of a parameter without dimensions.)
    """
    return counter.float() if group.get("capturable") else counter.item()
