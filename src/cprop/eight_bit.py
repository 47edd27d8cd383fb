"""State in eight bits, block-wise quantised by torchao: made, recognised, and taken apart for a kernel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from cprop.sharding import local

__all__ = ["assemble", "block_size", "example", "fits", "is_quantised", "length", "parts", "zeros"]

LARGEST_BLOCK: Final = 256
SMALLEST_BLOCK: Final = 64
"""Elements that share a scale: torchao's 256, or fewer for tensors that do not come in whole blocks of that."""


@cache
def block_of(shape: torch.Size) -> int | None:
    """The largest block that divides a row of a tensor, or all of it, if there is one that is worth it.

    Of a row if possible: then the blocks are the same however the rows are sharded.

    Example:
        >>> [block_of(torch.Size(shape)) for shape in ((1024, 1024), (300, 784), (4096,), (4099,))]
        [256, 196, 256, None]
    """
    for count in (math.prod(shape[1:]), math.prod(shape)):
        for size in range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1):
            if count % size == 0:
                return size
    return None


def fits(p: Tensor) -> bool:
    """Whether a parameter is worth quantising, and can be: in whole blocks on this rank."""
    shard = local(p)
    worth = shard.numel() >= 4096 and shard.is_contiguous()
    return worth and block_of(shard.shape) is not None


def zeros(p: Tensor, signed: bool) -> Tensor:
    """Zero state for a parameter, sharded like it."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("cprop_state_dtype='8bit' needs torchao: pip install 'cprop[lean]'") from error
    shard = local(p)
    with torch.device("cpu"):  # torchao computes its table of numbers wherever tensors are made by default
        state: Tensor = OptimState8bit.zeros(shard.shape, signed, block_of(shard.shape), shard.device, torch.float32)
    if shard is p:
        return state
    from torch.distributed.tensor import DTensor

    whole: Any = p
    return DTensor.from_local(
        state, whole.device_mesh, whole.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is torchao's, without asking torchao."""
    return type(tensor).__name__ == "OptimState8bit"


def block_size(tensor: Tensor) -> int | None:
    """How many elements of a tensor share a scale; ``None`` if it is not quantised."""
    quantised: Any = tensor
    return quantised.block_size if is_quantised(tensor) else None


SEPARATOR: Final = "/"
"""What stands between the name of a quantised tensor, its kind, and the name of a part of it."""


def parts(names: tuple[str, ...], row: tuple[Tensor, ...]) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """A parameter's tensors as a kernel takes them: if some are quantised, those in parts, and all in rows."""
    block = next(filter(None, map(block_size, row)), None)
    if block is None:
        return names, row
    views: dict[str, Tensor] = {}
    for name, tensor in zip(names, row, strict=True):
        if is_quantised(tensor):
            whole: Any = tensor
            prefix = SEPARATOR.join((name, "signed" if whole.signed else "unsigned", ""))
            views[f"{prefix}codes"] = whole.codes.view(-1, block)
            views |= {f"{prefix}scale": whole.scale, f"{prefix}qmap": whole.qmap}
        else:
            views[name] = tensor.view(-1, block)
    return tuple(views), tuple(views.values())


def assemble(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that :func:`parts` took apart, and others as they are."""
    tensors: dict[str, Tensor] = {}
    for key, view in views.items():
        name, _, rest = key.partition(SEPARATOR)
        if not rest:
            tensors[name] = view
        elif rest.endswith("codes"):
            from torchao.optim.subclass_8bit import OptimState8bit

            prefix = key.removesuffix("codes")
            pieces = (view, views[f"{prefix}scale"], views[f"{prefix}qmap"])
            tensors[name] = OptimState8bit(*pieces, rest.startswith("signed"), dtype=torch.float32)
    return tensors


def length(names: tuple[str, ...], first: Tensor) -> int:
    """How long a kernel's inputs are: as many as the first has elements, or rows of a block if some are quantised."""
    return first.shape[0] if SEPARATOR in "".join(names) else first.numel()


def example(name: str, names: Collection[str], elements: int) -> tuple[int, ...]:
    """The shape of one of a kernel's inputs, by its name and the names of all.

    A block is as long as none will be, so that tracing takes it for no number that it knows.
    """
    if SEPARATOR not in "".join(names):
        return (elements,)
    block = LARGEST_BLOCK // 2 + 2
    part = name.rpartition(SEPARATOR)[2] if SEPARATOR in name else ""
    return {"scale": (elements // block,), "qmap": (256,)}.get(part, (elements // block, block))
