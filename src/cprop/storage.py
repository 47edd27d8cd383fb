"""How state is stored between steps: in float32, or in bfloat16 with stochastic rounding.

Rules compute in float32 (or float64) for either format: :func:`load` converts stored state to it,
and :func:`store` converts it back.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.sharding import local

__all__ = ["FORMATS", "allocate", "is_rounded", "load", "random_bits", "restore", "store"]

FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"
FORMATS: Final = (FLOAT32, BFLOAT16)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, else float32. Half precision is only used for storage."""
    return torch.promote_types(dtype, torch.float32)


def allocate(p: Tensor, storage: str) -> Tensor:
    """Zero state with the shape, memory layout and sharding of a parameter.

    Only float32 state is stored in bfloat16; the state of float64 and complex parameters keeps its precision.

    Args:
        p: the parameter.
        storage: one of ``FORMATS``.
    """
    dtype = arithmetic_dtype(p.dtype)
    if storage == BFLOAT16 and dtype == torch.float32:
        dtype = torch.bfloat16
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def restore(saved: Tensor, p: Tensor, storage: str) -> Tensor:
    """A copy of saved state, in the format and memory layout that :func:`allocate` would use.

    The copy is exact if the format is the same, and converted otherwise. It is always a copy, so that
    training does not write into the checkpoint. It has the parameter's strides, as kernels require.

    Raises:
        ValueError: if the saved state is sharded differently from the parameter.
    """
    restored = allocate(p, storage)
    shard, source = local(restored), local(saved)
    if source.shape != shard.shape:
        raise ValueError(
            f"saved state has shape {tuple(source.shape)} on this rank and should have {tuple(shard.shape)}: "
            "it was sharded differently; load it with torch.distributed.checkpoint"
        )
    shard.copy_(source)
    return restored


def load(stored: Tensor) -> Tensor:
    """Stored state at compute precision."""
    return stored.to(arithmetic_dtype(stored.dtype))


def store(stored: Tensor, updated: Tensor, noise: Tensor | None) -> None:
    """Write state back, with stochastic rounding if it is stored in bfloat16.

    Rounding to nearest does not work: a running mean changes by a thousandth of the difference per
    step, and bfloat16 has two to three digits, so every change would be rounded away.

    Args:
        stored: where it is stored.
        updated: the new state, in float32 or float64.
        noise: 16 random bits per element for bfloat16, from :func:`random_bits`.
    """
    stored.copy_(updated if noise is None else round_stochastically(updated, noise))


def is_rounded(stored: Tensor) -> bool:
    """Whether state is rounded stochastically when it is stored."""
    return stored.dtype == torch.bfloat16


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    r"""Round float32 to bfloat16 stochastically: up with a probability equal to the truncated fraction.

    Args:
        x: float32 numbers.
        noise: 16 random bits each, from :func:`random_bits`.

    Example:
        >>> x = torch.tensor([1.001])                     # between 1 and 1 + 2**-7
        >>> rounded = torch.cat([round_stochastically(x, random_bits(x, float(t))) for t in range(4000)])
        >>> rounded.unique().tolist(), round(rounded.float().mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)


def random_bits(x: Tensor, t: Number) -> Tensor:
    """16 random bits per element: a hash of float32 numbers and the step.

    So there is no generator state to save. A resumed run rounds exactly as an uninterrupted one, and a shard exactly as
    the whole tensor.

    Args:
        x: float32 numbers.
        t: the step; the same number may round differently at another step.
    """
    step = t.to(torch.int32) if isinstance(t, Tensor) else int(t) & 0x7FFFFFFF
    h = (x.view(torch.int32) + step * 40503) * 0x45D9F3B
    h = (h ^ upper_half(h)) * 0x2C1B3C6D
    return upper_half(h)


def upper_half(x: Tensor) -> Tensor:
    """The upper 16 bits, which are the best mixed ones of a product."""
    return (x >> 16) & 0xFFFF
