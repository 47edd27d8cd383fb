"""Sharded parameters: the local part of a tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["PLAIN", "local", "positions", "sharded_like"]

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


def positions(tensor: Tensor) -> int | Tensor:
    """Where this rank's elements are in the memory of the whole tensor, without communication.

    Returns:
        The position of the first element if the others follow it in the order of this rank's memory, as in a tensor
        that is sharded by its rows; or else the position of every element, as int32 in the layout of the shard.
    """
    shard = local(tensor)
    if shard is tensor:
        return 0
    strides, first = tensor.stride(), first_indices_of(tensor)
    sizes = tuple(shard.shape)
    start = sum(index * stride for index, stride in zip(first, strides, strict=True))
    if shard.numel() in (0, 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))):
        return start
    found = torch.full((), start, dtype=torch.int64, device=shard.device)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        along = torch.arange(size, device=shard.device) * stride
        found = found + along.view(-1, *[1] * (len(sizes) - dim - 1))
    return torch.empty_like(shard, dtype=torch.int32).copy_(found)


def first_indices_of(tensor: Any) -> tuple[int, ...]:
    """The indices of this rank's first element in the whole of a DTensor."""
    mesh = tensor.device_mesh
    return first_indices(tensor.shape, mesh, tuple(mesh.get_coordinate() or ()), tuple(tensor.placements))


@lru_cache(maxsize=4096)
def first_indices(
    shape: torch.Size, mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[int, ...]:
    """As above, where the mesh has the rank at a coordinate; outside of the mesh, a rank has no elements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1]) if coordinate else (0,) * len(shape)
