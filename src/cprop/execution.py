"""Runs rules over tensors: as a for-loop, foreach, or fused."""

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
from cprop.measures import is_built_in
from cprop.rules import Rule, apply, with_finite_grad, write
from cprop.sharding import PLAIN, local
from cprop.storage import load
from cprop.tensor_list import TensorList

__all__ = ["Implementation", "Job", "choose_implementation", "prepare", "run_all"]


Row: TypeAlias = tuple[Tensor, ...]
"""One parameter's tensors."""


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
    """The current step."""


class Implementation(Enum):
    """The implementations of a rule. Results are the same up to rounding."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FUSED = "fused"


def choose_implementation(params: Sequence[Tensor], foreach: bool | None, fused: bool | None) -> Implementation:
    """The implementation that torch would choose for these parameters and flags."""
    if foreach and fused:
        raise RuntimeError("foreach=True and fused=True are mutually exclusive: set only one of them")
    if fused:
        return Implementation.FUSED
    if foreach is None and fused is None:
        _, foreach = _default_to_fused_or_foreach(list(params), differentiable=False)
    return Implementation.FOREACH if foreach else Implementation.FOR_LOOP


def prepare(rule: Rule, jobs: Iterable[Job], flags: Any, implementation: Implementation) -> list[Callable[[], None]]:
    """Prepare a rule for the parameters of a group, and return the functions that run it.

    Everything that can fail happens here, such as checking tensors and compiling kernels. So a step either updates
    all parameters or none.
    """
    if torch.compiler.is_compiling():
        # The caller compiles the whole step, so run the rule itself.
        implementation = Implementation.FOR_LOOP
    if implementation is Implementation.FOREACH and not is_built_in(getattr(flags, "measure", flags)):
        # A list of tensors supports only what rules and built-in measures use.
        implementation = Implementation.FOR_LOOP
    runs = []
    for job in jobs:
        for row in job.rows:
            require_one_shape(job.names, row)
        runs.append(_PREPARE[implementation](rule, job, flags))
    return runs


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


def run_for_loop(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule as a for-loop over parameters: the reference implementation."""
    for row in job.rows:
        apply(rule, dict(zip(job.names, map(elements, row), strict=True)), job.scalars, flags, job.t)


BLOCK: Final = 1 << 17
"""Number of elements per foreach call on a CPU, so that temporaries stay in the cache."""


def run_foreach(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on lists of tensors; on a CPU, on lists of blocks that fit in the cache."""
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
    """Run a rule on the columns of a job; each is a list of tensors with the same dtype and device."""
    stored = dict(zip(job.names, map(list, zip(*job.rows, strict=True)), strict=True))
    # A TensorList supports every operation that a rule uses, but is not a Tensor for the type checker.
    working = {name: cast("Tensor", TensorList([load(x) for x in column])) for name, column in stored.items()}
    for name, updated in rule(with_finite_grad(working), job.scalars, flags).items():
        results = cast("TensorList", updated).tensors
        if stored[name][0].dtype == results[0].dtype:
            torch._foreach_copy_(stored[name], results)
        else:
            for tensor, result in zip(stored[name], results, strict=True):
                write(name, tensor, result, job.t)


def cache_sized(rows: list[Row]) -> Iterator[list[Row]]:
    """Group rows into batches of about ``BLOCK`` elements; longer vectors are split."""
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
    """Look up or compile a rule's kernels; one is launched per parameter.

    This loop dominates a step with many small parameters, so it uses ``map`` over C functions.
    """
    packed: dict[Any, compiled.Packed] = {}
    kernels: dict[compiled.Signature, tuple[compiled.Kernel, Tensor]] = {}
    calls: list[Callable[[], object]] = []
    plain = are_plain(job.rows)
    for row in job.rows:
        inputs = row
        if not plain:
            inputs = tuple(map(elements, row))
            if not in_one_order(inputs):
                calls.append(partial(run_for_loop, rule, job._replace(rows=[row]), flags))
                continue
        count, device = inputs[0].numel(), inputs[0].device
        long = count >= compiled.LONG or device.type != "cpu"
        signature = compiled.Signature(job.names, tuple(map(_DTYPE, inputs)), device, long)
        if signature not in kernels:
            place = (signature.number_dtype, device)
            if place not in packed:
                packed[place] = compiled.pack(compiled.Call(job.scalars, job.t), *place)
            numbers, structure = packed[place]
            kernels[signature] = compiled.get_kernel(rule, flags, structure, signature), numbers
        kernel, numbers = kernels[signature]
        if count:
            calls.append(partial(kernel, count, *inputs, numbers))
    return partial(run_all, calls)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all functions in order."""
    for call in calls:
        call()


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


def are_plain(rows: list[Row]) -> bool:
    """Whether tensors can be passed to a kernel unchanged: not sharded, real, and contiguous."""
    tensors = list(chain.from_iterable(rows))
    plain = PLAIN.issuperset(map(type, tensors)) and all(map(Tensor.is_contiguous, tensors))
    return plain and not any(map(Tensor.is_complex, tensors))


def deferred(run: Callable[[Rule, Job, Any], None]) -> Callable[[Rule, Job, Any], Callable[[], None]]:
    """Adapt an implementation that needs no preparation."""
    return lambda rule, job, flags: partial(run, rule, job, flags)


_PREPARE: Final = {
    Implementation.FOR_LOOP: deferred(run_for_loop),
    Implementation.FOREACH: deferred(run_foreach),
    Implementation.FUSED: prepare_fused,
}
