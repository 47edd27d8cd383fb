"""Sharded parameters: the local part of a tensor."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["PLAIN", "local", "sharded_like"]

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})
"""Tensor types that are never sharded."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, or else the tensor itself."""
    if type(tensor) not in PLAIN and hasattr(tensor, "to_local"):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """The tensor that has a shard on this rank, and is sharded like the given one; the shard itself if that is not."""
    if local(tensor) is tensor:
        return shard
    whole = torch.empty_like(tensor, dtype=shard.dtype)
    local(whole).copy_(shard)
    return whole
