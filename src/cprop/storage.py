"""How state is stored between steps: in float32, or in bfloat16 with stochastic rounding.

A rule computes in float32 whatever the format: :func:`load` brings stored state there, and
:func:`store` takes it back.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.sharding import local

__all__ = ["FORMATS", "allocate", "load", "restore", "store"]

FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"
FORMATS: Final = (FLOAT32, BFLOAT16)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 where the dtype is: half precision is a format to store in."""
    return torch.promote_types(dtype, torch.float32)


def allocate(p: Tensor, storage: str) -> Tensor:
    """Zero state laid out and sharded like a parameter.

    State of float64 and complex parameters keeps the precision of the arithmetic: only float32 is rounded to less.

    Args:
        p: the parameter.
        storage: one of ``FORMATS``.
    """
    dtype = arithmetic_dtype(p.dtype)
    if storage == BFLOAT16 and dtype == torch.float32:
        dtype = torch.bfloat16
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def restore(saved: Tensor, p: Tensor, storage: str) -> Tensor:
    """Saved state as :func:`allocate` would make it, a copy always: training on must not write into a checkpoint.

    The same format comes back to the bit; another one is converted. However the saved tensor lay in
    memory, the copy lies as the parameter does: a kernel takes only tensors in one order.

    Raises:
        ValueError: if the saved state is sharded in another way than the parameter.
    """
    restored = allocate(p, storage)
    shard, source = local(restored), local(saved)
    if source.shape != shard.shape:
        raise ValueError(
            f"saved state has shape {tuple(source.shape)} on this rank and should have {tuple(shard.shape)}: "
            "it was sharded in another way; load it with torch.distributed.checkpoint"
        )
    shard.copy_(source)
    return restored


def load(stored: Tensor) -> Tensor:
    """Stored state in the precision that rules compute in."""
    return stored.to(arithmetic_dtype(stored.dtype))


def store(stored: Tensor, updated: Tensor, t: Number) -> None:
    """Write state back, rounding to bfloat16 at random: up or down, in proportion to the distances.

    To the nearest would not do: of a mean that moves by a thousandth of the difference each step,
    bfloat16 keeps two to three digits, and would round every step away.
    """
    if stored.dtype == torch.bfloat16:
        updated = round_stochastically(updated, t)
    stored.copy_(updated)


def round_stochastically(x: Tensor, t: Number) -> Tensor:
    r"""Float32 to bfloat16, rounded up with the probability of the part that is cut off.

    The random bits are a hash of the number itself and of the step. So there is no generator whose
    state would have to be saved; a resumed run rounds as an unbroken one, and a shard as the whole.

    Args:
        x: float32 numbers.
        t: the step; the same number is rounded another way at another step.

    Example:
        >>> x = torch.tensor([1.001])                     # between 1 and 1 + 2**-7
        >>> rounded = torch.cat([round_stochastically(x, float(t)) for t in range(4000)])
        >>> rounded.unique().tolist(), round(rounded.float().mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    bits = x.view(torch.int32)
    step = t.to(torch.int32) if isinstance(t, Tensor) else int(t) & 0x7FFFFFFF
    h = mix(mix(bits + step * 40503) + step)
    return ((bits + (h & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def mix(x: Tensor) -> Tensor:
    """Scatter the bits of an integer over all of it."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
    return x ^ ((x >> 15) & 0x1FFFF)
