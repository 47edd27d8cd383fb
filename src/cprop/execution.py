"""How a rule is run: the rules say what happens to one element, this says it to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from cprop import compiled
from cprop.arithmetic import Number
from cprop.rules import Rule, apply, usable, write
from cprop.sharding import PLAIN, local
from cprop.storage import load
from cprop.tensor_list import TensorList

__all__ = ["Job", "Way", "choose", "prepare"]


Row: TypeAlias = tuple[Tensor, ...]
"""One parameter's tensors."""


class Job(NamedTuple):
    """Parameters that march in step: tensors of the same names, and scalars that they share.

    Most of the time all parameters of a group do, and a group is one job. Counters on a device are not
    read, so with ``capturable`` each parameter is a job of its own.
    """

    names: tuple[str, ...]
    rows: list[Row]
    """A row a parameter, each in the order of the names."""
    scalars: Any
    t: Number
    """The number of the step."""


class Way(Enum):
    """The ways to run a rule; the same numbers, up to rounding."""

    TENSOR_BY_TENSOR = "tensor by tensor"
    FOREACH = "foreach"
    FUSED = "fused"


def choose(params: Sequence[Tensor], foreach: bool | None, fused: bool | None) -> Way:
    """The way that torch would choose for these parameters and flags."""
    if foreach and fused:
        raise RuntimeError("foreach=True and fused=True exclude each other: choose one")
    if fused:
        return Way.FUSED
    if foreach is None and fused is None:
        _, foreach = _default_to_fused_or_foreach(list(params), differentiable=False)
    return Way.FOREACH if foreach else Way.TENSOR_BY_TENSOR


def prepare(rule: Rule, jobs: Iterable[Job], flags: Any, way: Way) -> list[Callable[[], None]]:
    """Everything that may fail before a rule is run over the parameters of a group; then call what is returned.

    The tensors are looked at and the kernels are compiled here, so that a step moves everything or nothing.
    """
    if torch.compiler.is_compiling():
        # The caller compiles the whole step: hand over the rule itself.
        way = Way.TENSOR_BY_TENSOR
    runs = []
    for job in jobs:
        for row in job.rows:
            require_one_shape(job.names, row)
        runs.append(_PREPARE[way](rule, job, flags))
    return runs


def elements(tensor: Tensor) -> Tensor:
    """The real elements of a tensor that lie on this rank, as a view.

    A rule is element-wise, so a shard is worked on as it lies: no communication, and no need of
    torch to know how each operation of the rule is sharded. A complex number is two elements, as
    in torch's own optimizers.
    """
    shard = local(tensor)
    return torch.view_as_real(shard) if shard.is_complex() else shard


def in_one_order(row: Row) -> bool:
    """Whether tensors of one shape fill their memory without gaps, and all of them in the same order."""
    if all(map(Tensor.is_contiguous, row)):
        return True
    strides = row[0].stride()
    return is_dense(row[0]) and all(tensor.stride() == strides for tensor in row)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def run_tensor_by_tensor(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on one parameter after the other: the readable truth."""
    for row in job.rows:
        apply(rule, dict(zip(job.names, map(elements, row), strict=True)), job.scalars, flags, job.t)


BLOCK: Final = 1 << 17
"""Elements that a rule is run over at a time on a CPU, so that its temporaries stay in the cache."""


def run_foreach(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on lists of tensors; on a CPU, on lists of blocks that the cache can hold."""
    alike: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in job.rows:
        views = tuple(map(elements, row))
        if in_one_order(views):
            views = tuple(x.as_strided((x.numel(),), (1,)) for x in views)
        alike[(views[0].device, *map(_DTYPE, views))].append(views)
    for rows in alike.values():
        for batch in [rows] if rows[0][0].device.type != "cpu" else cache_sized(rows):
            run_lists(rule, job._replace(rows=batch), flags)


def run_lists(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on the columns of a job, each a list of tensors of one dtype and device."""
    stored = dict(zip(job.names, map(list, zip(*job.rows, strict=True)), strict=True))
    # A TensorList has all that a rule asks of a tensor, but is none to the type checker.
    working = {name: cast("Tensor", TensorList([load(x) for x in column])) for name, column in stored.items()}
    for name, updated in rule(usable(working), job.scalars, flags).items():
        results = cast("TensorList", updated).tensors
        if stored[name][0].dtype == results[0].dtype:
            torch._foreach_copy_(stored[name], results)
        else:
            for tensor, result in zip(stored[name], results, strict=True):
                write(name, tensor, result, job.t)


def cache_sized(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows in batches of about ``BLOCK`` elements; vectors that are longer come in pieces."""
    batch: list[Row] = []
    room = BLOCK
    for row in rows:
        whole = row[0].dim() != 1 or row[0].numel() <= BLOCK
        pieces = [row] if whole else zip(*(torch.split(x, BLOCK) for x in row), strict=True)
        for piece in pieces:
            if batch and piece[0].numel() > room:
                yield batch
                batch, room = [], BLOCK
            batch.append(piece)
            room -= piece[0].numel()
    yield batch


_DTYPE: Final = attrgetter("dtype")


def prepare_fused(rule: Rule, job: Job, flags: Any) -> Callable[[], None]:
    """Find a rule's kernels, to run one per parameter.

    A step of many small parameters waits for this loop, hence the ``map`` over functions in C.
    """
    packed: dict[Any, compiled.Packed] = {}
    kernels: dict[compiled.Kind, tuple[compiled.Kernel, Tensor]] = {}
    calls: list[Callable[[], object]] = []
    plain = are_plain(job.rows)
    for row in job.rows:
        inputs = row
        if not plain:
            inputs = tuple(map(elements, row))
            if not in_one_order(inputs):
                calls.append(partial(run_tensor_by_tensor, rule, job._replace(rows=[row]), flags))
                continue
        count, device = inputs[0].numel(), inputs[0].device
        long = count >= compiled.LONG or device.type != "cpu"
        kind = compiled.Kind(job.names, tuple(map(_DTYPE, inputs)), device, long)
        if kind not in kernels:
            place = (kind.number_dtype, device)
            if place not in packed:
                packed[place] = compiled.pack(compiled.Call(job.scalars, job.t), *place)
            numbers, structure = packed[place]
            kernels[kind] = compiled.kernel(rule, flags, structure, kind), numbers
        kernel, numbers = kernels[kind]
        if count:
            calls.append(partial(kernel, count, *inputs, numbers))
    return partial(run_all, calls)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call one after the other."""
    for call in calls:
        call()


def require_one_shape(names: tuple[str, ...], row: Row) -> None:
    """Refuse state that is not shaped like its parameter: a kernel does not look, and would run past its end."""
    shape = row[0].shape
    for tensor in row:
        if tensor.shape != shape:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, row, strict=True))
            raise RuntimeError(
                f"the tensors of a parameter differ in shape ({shapes}): its data was replaced after the first step; "
                "drop optimizer.state[p], or build a new optimizer"
            )


def are_plain(rows: list[Row]) -> bool:
    """Whether tensors can be given to a kernel as they are: on this rank, real, and in the usual order."""
    tensors = list(chain.from_iterable(rows))
    plain = PLAIN.issuperset(map(type, tensors)) and all(map(Tensor.is_contiguous, tensors))
    return plain and not any(map(Tensor.is_complex, tensors))


def deferred(run: Callable[[Rule, Job, Any], None]) -> Callable[[Rule, Job, Any], Callable[[], None]]:
    """A way that needs no preparation."""
    return lambda rule, job, flags: partial(run, rule, job, flags)


_PREPARE: Final = {
    Way.TENSOR_BY_TENSOR: deferred(run_tensor_by_tensor),
    Way.FOREACH: deferred(run_foreach),
    Way.FUSED: prepare_fused,
}
