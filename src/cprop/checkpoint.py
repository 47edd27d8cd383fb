"""How a ``state_dict`` is read: matched to parameters, checked, and cast, before anything changes.

torch's own ``load_state_dict`` casts floating state to the parameter's dtype, all but the key
``step``. For bfloat16 parameters that would round the statistics to three digits and the counter
to multiples of a power of two; so the optimizers here read their state themselves.

Whatever is wrong with a checkpoint, the answer is a :class:`CheckpointError`, and the optimizer is
as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from cprop.conformity import MEASURES, measure_name
from cprop.moments import PREFIX, STEP

__all__ = [
    "MEASURE",
    "CheckpointError",
    "all_or_none",
    "check_counter",
    "check_tensor",
    "is_placeholder",
    "match",
    "merge_settings",
    "refusing_what_does_not_fit",
]


class CheckpointError(ValueError):
    """A checkpoint that does not fit, or is damaged; nothing of it was loaded."""


@contextmanager
def refusing_what_does_not_fit() -> Iterator[None]:
    """Turn whatever goes wrong while a checkpoint is read into a :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint does not fit this optimizer ({type(error).__name__}: {error}): it is damaged, "
            "or of an optimizer with other settings"
        ) from error


def match(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter, by position in the groups as torch does it.

    An optimizer may keep state that is no parameter's, under keys of its own: that is left out.

    Raises:
        CheckpointError: if the groups or the parameters differ in number, or the state is not what
            a ``state_dict`` holds.
    """
    try:
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        saved_ids = [list(group["params"]) for group in saved_groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "this is not an optimizer's state_dict: it needs 'state' and 'param_groups', and each group "
            f"its 'params' ({error!r})"
        ) from error
    if len(saved_groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved_groups)} param groups and the optimizer {len(groups)}: "
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
        raise CheckpointError("the checkpoint names a parameter twice: it is damaged")
    of_parameters = {i: entries for i, entries in saved_state.items() if i in params}
    for i, entries in of_parameters.items():
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise CheckpointError(f"the state of parameter {i!r} is no dictionary of named entries: it is damaged")
    return {params[i]: dict(entries) for i, entries in of_parameters.items()}


def check_tensor(key: str, saved: Any, shape: torch.Size) -> Tensor:
    """A saved tensor of real or complex numbers, if it is one and of the right shape.

    Raises:
        CheckpointError: if it is not.
    """
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"state {key!r} should be a tensor, and is of type {type(saved).__name__}")
    if not (saved.is_floating_point() or saved.is_complex()):
        raise CheckpointError(f"state {key!r} should hold floating-point numbers, and holds {saved.dtype}")
    if saved.shape != shape:
        raise CheckpointError(
            f"state {key!r} has shape {tuple(saved.shape)} in the checkpoint and should have {tuple(shape)}: "
            "the checkpoint is of another model, or the parameters are in another order"
        )
    return saved


def check_counter(key: str, saved: Any) -> float:
    """A saved number of steps, from a tensor or a number.

    Raises:
        CheckpointError: if it is neither, or not a number of steps.
    """
    if isinstance(saved, Tensor) and saved.numel() != 1:
        raise CheckpointError(f"state {key!r} should be one number, and has shape {tuple(saved.shape)}")
    if isinstance(saved, bool) or not isinstance(saved, int | float | Tensor):
        raise CheckpointError(f"state {key!r} should be a number, and is of type {type(saved).__name__}")
    value = float(saved)
    if not (0 <= value < math.inf):
        raise CheckpointError(f"state {key!r} is {value}, which is no number of steps")
    return value


def all_or_none(saved: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse state of which a part is missing: going on from half of it would go wrong silently."""
    missing = [key for key in keys if key not in saved]
    if missing and len(missing) < len(keys):
        present = [key for key in keys if key in saved]
        raise CheckpointError(
            f"the checkpoint has state {present} but not {missing}: it is incomplete, or of an optimizer with "
            "other settings"
        )


def is_placeholder(saved: Mapping[str, Any]) -> bool:
    """Whether saved state stands for a parameter that had not had a gradient."""
    return STEP in saved and check_counter(STEP, saved[STEP]) == 0 and saved.get("step", 0) == 0


MEASURE: Final = "cprop_measure"
"""The one setting that may be a function, or an object that is called: it is looked up and never copied."""


def kind(value: Any) -> Any:
    """What sort of setting a value is: a number may replace a number, and nothing else."""
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 else "tensor"
    if isinstance(value, bool):
        return "switch"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str) or callable(value):
        return "name"
    if isinstance(value, Sequence):
        return tuple(map(kind, value))
    return type(value).__name__


def is_needed(name: str, present: Any) -> bool:
    """Whether a setting is a number, or numbers, of the algorithm: without it the checkpoint is of another one."""
    return not name.startswith(PREFIX) and (kind(present) == "number" or isinstance(present, Sequence | Tensor))


def acceptable(present: Any) -> tuple[Any, ...]:
    """The sorts of setting that may replace one: ``None`` stands for a switch, or a number, that is not set."""
    if present is None:
        return "NoneType", "switch", "number"
    return (kind(present), "NoneType") if isinstance(present, bool) else (kind(present),)


def merge_settings(
    saved_groups: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    defaults: Iterable[str],
    known: Collection[str],
) -> list[dict[str, Any]]:
    """A copy of the saved groups, with the settings they lack taken from the optimizer as it stands.

    A checkpoint of a plain optimizer has no settings of ours, and one of an older version lacks newer switches. A
    measure that is a function is saved by name only: it is looked up in the optimizer that loads.

    Args:
        saved_groups: the checkpoint's groups.
        groups: the optimizer's, as many.
        defaults: the settings to take from the optimizer where a saved group lacks them.
        known: the settings of which it is known that their sort never changes.

    Raises:
        CheckpointError: if a number that the algorithm needs is missing, a known setting is of another sort than the
            optimizer's, or a saved measure is neither known nor the one the optimizer was built with.
    """
    merged = []
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        for name in saved.keys() & group.keys() & set(known):
            if kind(saved[name]) not in acceptable(group[name]):
                raise CheckpointError(
                    f"{name!r} of param group {index} is {saved[name]!r} in the checkpoint and {group[name]!r} in the "
                    "optimizer: the checkpoint is damaged, or of another optimizer"
                )
        missing = [name for name in defaults if is_needed(name, group.get(name)) and name not in saved]
        if missing:
            raise CheckpointError(
                f"param group {index} of the checkpoint has no {', '.join(map(repr, missing))}, which this optimizer "
                "needs: it is of another algorithm; build the one it was saved with, or start without its state"
            )
        present = group[MEASURE]
        measure = saved.get(MEASURE, present)
        if measure in (present, measure_name(present)):
            measure = present
        elif measure not in MEASURES:
            raise CheckpointError(
                f"the checkpoint was made with measure {measure!r}, which is not one of ours: "
                "build the optimizer with that function as its measure, then load"
            )
        lacking = {name: group[name] for name in (*defaults, "param_names") if name in group and name not in saved}
        # Copies, each for itself: a tensor learning rate is written to by its scheduler.
        copies = {name: copy.deepcopy(value) for name, value in saved.items() if name != MEASURE}
        merged.append({**copies, **lacking, MEASURE: measure})
    return merged
