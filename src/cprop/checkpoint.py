"""How a ``state_dict`` is read: matched to parameters, checked, and cast, before anything changes.

torch's own ``load_state_dict`` casts floating state to the parameter's dtype, all but the key
``step``. For bfloat16 parameters that would round the statistics to three digits and the counter
to multiples of a power of two; so the optimizers here read their state themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cprop.conformity import measure_name, resolve_measure

__all__ = ["CheckpointError", "all_or_none", "check_tensor", "match", "merge_settings"]


class CheckpointError(ValueError):
    """A ``state_dict`` that does not fit this optimizer; nothing of it was loaded."""


def match(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter, by position in the groups as torch does it.

    Raises:
        CheckpointError: if the groups or the parameters differ in number.
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
    return {params[i]: dict(entries) for i, entries in saved_state.items() if i in params}


def check_tensor(key: str, saved: Any, shape: torch.Size) -> Tensor:
    """A saved tensor, or number, if it is one and of the right shape.

    Raises:
        CheckpointError: if it is not.
    """
    if isinstance(saved, int | float):
        saved = torch.tensor(float(saved))
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"state {key!r} should be a tensor, and is of type {type(saved).__name__}")
    if saved.shape != shape:
        raise CheckpointError(
            f"state {key!r} has shape {tuple(saved.shape)} in the checkpoint and should have {tuple(shape)}: "
            "the checkpoint is of another model, or the parameters are in another order"
        )
    return saved


def all_or_none(saved: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse state of which a part is missing: going on from half of it would go wrong silently."""
    missing = [key for key in keys if key not in saved]
    if missing and len(missing) < len(keys):
        present = [key for key in keys if key in saved]
        raise CheckpointError(
            f"the checkpoint has state {present} but not {missing}: it is incomplete, or of an optimizer with "
            "other settings"
        )


def merge_settings(
    saved_groups: list[dict[str, Any]], groups: list[dict[str, Any]], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The saved groups, with the settings they lack taken from the optimizer as it stands.

    A checkpoint of a plain optimizer has no settings of ours, and a measure that is a function is
    saved by name only: it is looked up in the optimizer that loads.

    Raises:
        CheckpointError: if a saved measure is neither known nor the one the optimizer was built with.
    """
    merged = []
    for saved, group in zip(saved_groups, groups, strict=True):
        settings = {name: saved.get(name, group[name]) for name in names}
        present = group["cprop_measure"]
        if settings["cprop_measure"] == measure_name(present):
            settings["cprop_measure"] = present
        try:
            resolve_measure(settings["cprop_measure"])
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint was made with measure {settings['cprop_measure']!r}, which is not one of ours: "
                "build the optimizer with that function as its measure, then load"
            ) from error
        merged.append({**saved, **settings})
    return merged
