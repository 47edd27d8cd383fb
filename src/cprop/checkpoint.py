"""Reading a ``state_dict``: matched to parameters, checked and cast before anything changes.

torch's own ``load_state_dict`` casts floating-point state to the parameter's dtype, except for the
key ``step``. With bfloat16 parameters this would round the statistics to three digits, and large
step counters to multiples of a power of two. So the optimizers here read their state themselves.

Any problem with a checkpoint raises a :class:`CheckpointError` and leaves the optimizer unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from cprop.measures import MEASURES, measure_name
from cprop.statistics import PREFIX, STEP

__all__ = [
    "MEASURE",
    "CheckpointError",
    "all_or_none",
    "as_checkpoint_errors",
    "check_counter",
    "check_tensor",
    "is_placeholder",
    "match",
    "merge_settings",
]


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not match the optimizer; none of it was loaded."""


@contextmanager
def as_checkpoint_errors() -> Iterator[None]:
    """Turn any exception while reading a checkpoint into a :class:`CheckpointError`, unless memory ran out."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):  # torch has no exception of its own for the memory of a CPU
            raise
        raise CheckpointError(
            f"the checkpoint does not match this optimizer ({type(error).__name__}: {error}): it is damaged, "
            "or was saved by an optimizer with other settings"
        ) from error


def match(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter, matched by position in the groups as in torch.

    State that belongs to no parameter, which some optimizers keep under their own keys, is skipped.

    Raises:
        CheckpointError: if the number of groups or parameters differs, or this is not a ``state_dict``.
    """
    try:
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        saved_ids = [list(group["params"]) for group in saved_groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "this is not an optimizer's state_dict: it needs 'state' and 'param_groups', and 'params' in each group "
            f"({error!r})"
        ) from error
    if len(saved_groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved_groups)} param groups and the optimizer has {len(groups)}: "
            "build the optimizer with the groups it was saved with"
        )
    for index, (ids, group) in enumerate(zip(saved_ids, groups, strict=True)):
        if len(ids) != len(group["params"]):
            raise CheckpointError(
                f"param group {index} has {len(ids)} parameters in the checkpoint and "
                f"{len(group['params'])} in the optimizer: build the optimizer with the groups it was saved with"
            )
    params = dict(zip(chain(*saved_ids), chain(*(group["params"] for group in groups)), strict=True))
    if len(params) != sum(map(len, saved_ids)):
        raise CheckpointError("the checkpoint lists a parameter twice: it is damaged")
    of_parameters = {i: entries for i, entries in saved_state.items() if i in params}
    for i, entries in of_parameters.items():
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise CheckpointError(f"the state of parameter {i!r} is not a dictionary with string keys: it is damaged")
    return {params[i]: dict(entries) for i, entries in of_parameters.items()}


def check_tensor(key: str, saved: Any, shape: torch.Size) -> Tensor:
    """Return a saved tensor if it is floating-point or complex and has the right shape.

    Raises:
        CheckpointError: if it is not.
    """
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"state {key!r} should be a tensor, but has type {type(saved).__name__}")
    if not (saved.is_floating_point() or saved.is_complex()):
        raise CheckpointError(f"state {key!r} should be floating-point or complex, but has dtype {saved.dtype}")
    if saved.shape != shape:
        raise CheckpointError(
            f"state {key!r} has shape {tuple(saved.shape)} in the checkpoint and should have {tuple(shape)}: "
            "the checkpoint belongs to another model, or the parameters are in another order"
        )
    return saved


def check_counter(key: str, saved: Any) -> float:
    """A saved step counter, from a tensor or a number.

    Raises:
        CheckpointError: if it is neither, or not a valid number of steps.
    """
    if isinstance(saved, Tensor) and saved.numel() != 1:
        raise CheckpointError(f"state {key!r} should be one number, but has shape {tuple(saved.shape)}")
    if isinstance(saved, bool) or not isinstance(saved, Real | Tensor):
        raise CheckpointError(f"state {key!r} should be a number, but has type {type(saved).__name__}")
    value = float(saved)
    if not (0 <= value < math.inf):
        raise CheckpointError(f"state {key!r} is {value}, which is not a valid number of steps")
    return value


def all_or_none(saved: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise if only part of the state is there: continuing from it would be silently wrong."""
    missing = [key for key in keys if key not in saved]
    if missing and len(missing) < len(keys):
        present = [key for key in keys if key in saved]
        raise CheckpointError(
            f"the checkpoint has state {present} but not {missing}: it is incomplete, or was saved by an optimizer "
            "with other settings"
        )


def is_placeholder(saved: Mapping[str, Any]) -> bool:
    """Whether saved state is a placeholder for a parameter that has never had a gradient."""
    return STEP in saved and check_counter(STEP, saved[STEP]) == 0 and saved.get("step", 0) == 0


MEASURE: Final = "cprop_measure"
"""The one setting that may be a callable: it is looked up by name and never copied."""


def kind(value: Any) -> Any:
    """The kind of a setting's value: a number may only replace a number."""
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 else "tensor"
    if isinstance(value, bool):
        return "switch"
    if isinstance(value, Real):  # NumPy's too
        return "number"
    if isinstance(value, str) or callable(value):
        return "name"
    if isinstance(value, Sequence):
        return tuple(map(kind, value))
    return type(value).__name__


def is_needed(name: str, present: Any) -> bool:
    """Whether a setting is a numeric hyperparameter of the algorithm, which every checkpoint of it has."""
    return not name.startswith(PREFIX) and (kind(present) == "number" or isinstance(present, Sequence | Tensor))


def acceptable(present: Any) -> tuple[Any, ...]:
    """The kinds of values that may replace a setting: ``None`` may become a switch or a number."""
    if present is None:
        return "NoneType", "switch", "number"
    return (kind(present), "NoneType") if isinstance(present, bool) else (kind(present),)


def merge_settings(
    saved_groups: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    defaults: Iterable[str],
    known: Collection[str],
) -> list[dict[str, Any]]:
    """A copy of the saved groups, with missing settings filled in from the optimizer.

    A checkpoint of a plain optimizer has none of CProp's settings, and one of an older version lacks newer flags. A
    callable measure is saved by name only, and taken from the optimizer that loads.

    Args:
        saved_groups: the checkpoint's groups.
        groups: the optimizer's groups, of the same number.
        defaults: the settings to take from the optimizer if a saved group lacks them.
        known: the settings whose kind never changes.

    Raises:
        CheckpointError: if a hyperparameter is missing, a known setting has another kind than in the optimizer,
            or a saved measure is neither a named one nor the optimizer's.
    """
    merged = []
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        for name in saved.keys() & group.keys() & set(known):
            if kind(saved[name]) not in acceptable(group[name]):
                raise CheckpointError(
                    f"{name!r} of param group {index} is {saved[name]!r} in the checkpoint and {group[name]!r} in the "
                    "optimizer: the checkpoint is damaged, or belongs to another optimizer"
                )
        missing = [name for name in defaults if is_needed(name, group.get(name)) and name not in saved]
        if missing:
            raise CheckpointError(
                f"param group {index} of the checkpoint has no {', '.join(map(repr, missing))}, which this optimizer "
                "needs: it was saved by another algorithm; build that one, or start without the checkpoint"
            )
        present = group[MEASURE]
        measure = saved.get(MEASURE, present)
        if measure in (present, measure_name(present)):
            measure = present
        elif measure not in MEASURES:
            raise CheckpointError(
                f"the checkpoint was saved with measure {measure!r}, which is not built in: "
                "build the optimizer with that function as its measure, then load"
            )
        lacking = {name: group[name] for name in (*defaults, "param_names") if name in group and name not in saved}
        # Separate copies, because a scheduler writes into a tensor learning rate.
        copies = {name: copy.deepcopy(value) for name, value in saved.items() if name != MEASURE}
        merged.append({**copies, **lacking, MEASURE: measure})
    return merged
