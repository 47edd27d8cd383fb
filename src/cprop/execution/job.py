"""A job: parameters that a rule runs on in the same way, and how their tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.rules import rounds
from cprop.sharding import local, positions
from cprop.storage import Draw

__all__ = ["Job", "Row", "as_vector", "draw_of", "dtype_of", "elements", "in_one_order", "require_one_shape", "run_all"]


Row: TypeAlias = tuple[Tensor, ...]
"""One parameter's tensors."""

dtype_of: Final = attrgetter("dtype")


class Job(NamedTuple):
    """Parameters at the same step, with the same tensor names and the same scalars.

    Usually a whole param group is one job. With ``capturable`` the step counters stay on the device
    and are not read, so each parameter is its own job.
    """

    names: tuple[str, ...]
    rows: list[Row]
    """One row per parameter, each in the order of ``names``."""
    scalars: Any
    t: Number
    """The current step, exactly: random bits depend on it."""
    seeds: Any = ()
    """A number per row, so that equal parameters are rounded differently; by default, all are zero."""

    def items(self) -> Iterable[tuple[Row, int]]:
        """The rows with their seeds."""
        return zip(self.rows, self.seeds or [0] * len(self.rows), strict=True)

    def only(self, items: Sequence[tuple[Row, int]]) -> Job:
        """The job with some of its rows."""
        return self._replace(rows=[row for row, _ in items], seeds=[seed for _, seed in items])

    def draw(self, row: Row, seed: int, flat: bool) -> Draw | None:
        """What a row's random bits depend on; None if it is not rounded.

        Args:
            row: the row.
            seed: its seed.
            flat: whether its tensors are worked on as vectors, in the order of their memory.
        """
        return draw_of(row[0], self.t, seed, flat) if rounds(self.names, row) else None


def elements(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a view of real numbers.

    Rules are element-wise, so each rank updates its own shard: without communication, and without
    sharding rules for the operations. A complex number is two elements, as in torch's own optimizers.
    """
    shard = local(tensor)
    return torch.view_as_real(shard) if shard.is_complex() else shard


def in_one_order(row: Row) -> bool:
    """Whether tensors of the same shape are all dense in memory, with the same strides."""
    if all(map(Tensor.is_contiguous, row)):
        return True
    strides = row[0].stride()
    return is_dense(row[0]) and all(tensor.stride() == strides for tensor in row)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous range of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def as_vector(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def draw_of(tensor: Tensor, t: Number, seed: int, flat: bool) -> Draw:
    """What the random bits of a tensor's elements depend on; see :meth:`Job.draw`."""
    first, shard = positions(tensor), elements(tensor)
    if isinstance(first, Tensor):
        return Draw.of(t, seed, positions=as_vector(first) if flat else first)
    if flat or shard.is_contiguous() or not is_dense(shard):
        return Draw.of(t, seed, first)
    in_memory = torch.empty_like(shard, dtype=torch.int32)
    as_vector(in_memory).copy_(torch.arange(shard.numel(), device=shard.device))
    return Draw.of(t, seed, first, in_memory)


def require_one_shape(names: tuple[str, ...], row: Row) -> None:
    """Raise if state does not have its parameter's shape: kernels do not check, and would read out of bounds."""
    shape = row[0].shape
    for tensor in row:
        if tensor.shape != shape:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, row, strict=True))
            raise RuntimeError(
                f"the tensors of a parameter differ in shape ({shapes}): its data was replaced after the first step; "
                "delete optimizer.state[p], or build a new optimizer"
            )


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all functions in order."""
    for call in calls:
        call()
