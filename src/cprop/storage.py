"""How state is stored between steps: in float32, or in bfloat16 with stochastic rounding.

Rules compute in float32 (or float64) for either format: :func:`load` converts stored state to it,
and :func:`store` converts it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import Number, is_traced
from cprop.sharding import local

__all__ = ["FORMATS", "Draw", "allocate", "is_rounded", "load", "origins", "random_bits", "restore", "store"]

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

    NaN stays NaN, and infinity infinity. As when rounding to nearest, what is beyond the largest bfloat16 may become
    infinite.

    Args:
        x: float32 numbers.
        noise: 16 random bits each, from :func:`random_bits`.

    Example:
        >>> x = torch.full((4000,), 1.001)                # between 1 and 1 + 2**-7
        >>> rounded = round_stochastically(x, random_bits(x, Draw(0)))
        >>> rounded.unique().tolist(), round(rounded.float().mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    rounded = ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32)
    # The bits of a NaN may be all ones, as on CUDA: adding to them gives -0.0. Outside of kernels, a comparison takes
    # several times as long as any other operation.
    kept = torch.where(x == x, rounded, x) if is_traced(x) else rounded * torch.clamp(x, 1.0, 1.0)
    return kept.to(torch.bfloat16)


class Draw(NamedTuple):
    """What the random bits of a parameter's elements depend on, besides the numbers themselves."""

    origin: Any
    """A hash of the step and the parameter, plus the position of the first element: 32 bits, with sign."""
    positions: Tensor | None = None
    """Each element's position relative to the origin, as int32; None if they follow each other."""

    @classmethod
    def of(cls, t: Number, seed: Any, first: Any = 0, positions: Tensor | None = None) -> Draw:
        """The draw of a parameter in a step.

        Args:
            t: the step, exactly: in float32, a counter ends at 2**24.
            seed: an integer that tells parameters apart that are alike; or a tensor of them, for many at once.
            first: position of the first element in the whole parameter.
            positions: position of every element, if they do not follow each other.
        """
        step = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
        # Numbers and tensors alike: nothing here exceeds 63 bits.
        key = (step & _31_BITS) * 0x45D9F3B + (step >> 31) * 0x2C1B3C6D + seed * 0x119DE1F3
        key = ((key ^ (key >> 29)) & _31_BITS) * 0x2C1B3C6D
        return cls((key ^ (key >> 31)) & _31_BITS, positions).at(first)

    def at(self, first: Any) -> Draw:
        """The draw of the elements from a position on."""
        return self._replace(origin=in_32_bits(self.origin + first))

    def part(self, start: int, length: int) -> Draw:
        """The draw of some of the elements of a vector."""
        if self.positions is None:
            return self.at(start)
        return self._replace(positions=self.positions[start : start + length])


_31_BITS: Final = 0x7FFFFFFF
_GOLDEN: Final = -0x61C88647
"""An odd number of 32 bits, 2**32 divided by the golden ratio: its multiples are far apart."""


def in_32_bits(x: Any) -> Any:
    """An integer, or a tensor of them, as its lower 32 bits with sign: what arithmetic of that width gives."""
    return x.to(torch.int32) if isinstance(x, Tensor) else (x + 0x80000000) % 0x100000000 - 0x80000000


def origins(t: Number, seeds: Sequence[int], firsts: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """The origins of many draws at once, as arguments of kernels: each begins a line of 16 bytes."""
    if isinstance(t, Tensor):
        found = torch.stack([Draw.of(t, *of_one).origin for of_one in zip(seeds, firsts, strict=True)])
    else:
        found = Draw.of(t, *(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (seeds, firsts))).origin
    lines = torch.zeros((len(seeds), 4), dtype=torch.int32, device=found.device)
    lines[:, 0] = found
    return lines.to(device, non_blocking=True).unbind()


def random_bits(x: Tensor, draw: Draw) -> Tensor:
    """16 random bits per element: a hash of the float32 number, the step, the parameter and the element's position.

    So there is no generator state to save. A resumed run rounds exactly as an uninterrupted one, and a shard exactly as
    the whole tensor. Equal numbers are rounded independently.
    """
    positions = draw.positions
    if positions is None:
        positions = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    h = (x.view(torch.int32) + (positions + draw.origin) * _GOLDEN) * 0x45D9F3B
    h = (h ^ upper_half(h)) * 0x2C1B3C6D
    return upper_half(h)


def upper_half(x: Tensor) -> Tensor:
    """The upper 16 bits, which are the best mixed ones of a product."""
    return (x >> 16) & 0xFFFF
