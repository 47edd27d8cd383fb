"""How a rule is run: the rules say what happens to one element, this says it to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from cprop import compiled, eight_bit
from cprop.arithmetic import Number
from cprop.eight_bit import is_quantised
from cprop.rules import Rule, apply, write
from cprop.sharding import local
from cprop.storage import load
from cprop.tensor_list import TensorList

__all__ = ["Job", "Way", "choose", "run"]


class Job(NamedTuple):
    """One parameter's share of a step: its tensors by name, the scalars of this step, and its number."""

    tensors: Mapping[str, Tensor]
    scalars: Any
    t: Number


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


def run(rule: Rule, jobs: Sequence[Job], flags: Any, way: Way) -> None:
    """Run a rule over the parameters of a group and write the results in place."""
    if torch.compiler.is_compiling():
        # The caller compiles the whole step: hand over the rule itself.
        way = Way.TENSOR_BY_TENSOR
    _RUNNERS[way](rule, jobs, flags)


def elements(tensor: Tensor) -> Tensor:
    """The real elements of a tensor that lie on this rank, as a view.

    A rule is element-wise, so a shard is worked on as it lies: no communication, and no need of
    torch to know how each operation of the rule is sharded. A complex number is two elements, as
    in torch's own optimizers.
    """
    shard = local(tensor)
    return torch.view_as_real(shard) if shard.is_complex() else shard


def vectors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """One parameter's tensors as vectors in the order of memory, or ``None`` if they are laid out differently.

    Quantised ones come in parts, and the others then in rows: see :func:`cprop.eight_bit.parts`.
    """
    views = {}
    for name, tensor in tensors.items():
        view = elements(tensor)
        if is_quantised(view):
            return eight_bit.parts(tensors)
        if not view.is_contiguous():
            return strided_vectors(tensors)
        views[name] = view.view(-1)
    return views


def strided_vectors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same for tensors that are transposed or channels-last, if they all are."""
    views = {name: elements(tensor) for name, tensor in tensors.items()}
    first = next(iter(views.values()))
    if is_dense(first) and all(view.stride() == first.stride() for view in views.values()):
        return {name: view.as_strided((view.numel(),), (1,)) for name, view in views.items()}
    return None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def run_tensor_by_tensor(rule: Rule, jobs: Sequence[Job], flags: Any) -> None:
    """Run a rule on one parameter after the other: the readable truth."""
    for job in jobs:
        stored = {name: elements(tensor) for name, tensor in job.tensors.items()}
        apply(rule, stored, job.scalars, flags, job.t)


BLOCK: Final = 1 << 17
"""Elements that a rule is run over at a time on a CPU, so that its temporaries stay in the cache."""


def run_foreach(rule: Rule, jobs: Sequence[Job], flags: Any) -> None:
    """Run a rule on lists of tensors; on a CPU, on lists of blocks that the cache can hold."""
    listed: list[Job] = []
    for job in jobs:
        if any(is_quantised(elements(tensor)) for tensor in job.tensors.values()):
            run_tensor_by_tensor(rule, [job], flags)
        else:
            listed.append(job)
    for job, batch in batches(listed):
        stored = {name: [tensors[name] for tensors in batch] for name in batch[0]}
        working = {name: TensorList([load(x) for x in tensors]) for name, tensors in stored.items()}
        # A TensorList has all that a rule asks of a tensor, but is none to the type checker.
        for name, updated in rule(cast("Mapping[str, Tensor]", working), job.scalars, flags).items():
            results = cast("TensorList", updated).tensors
            if stored[name][0].dtype == results[0].dtype:
                torch._foreach_copy_(stored[name], results)
            else:
                for tensor, result in zip(stored[name], results, strict=True):
                    write(name, tensor, result, job.t)


def batches(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[dict[str, Tensor]]]]:
    """Tensors that have scalars, devices and dtypes in common, cut into blocks on a CPU, with one job of theirs."""
    alike: defaultdict[Any, list[dict[str, Tensor]]] = defaultdict(list)
    examples: dict[Any, Job] = {}
    for job in jobs:
        tensors = vectors(job.tensors)
        if tensors is None:
            tensors = {name: elements(tensor) for name, tensor in job.tensors.items()}
        kinds = tuple((name, x.dtype, x.device) for name, x in tensors.items())
        key = (kinds, id(job.scalars))
        examples[key] = job
        alike[key].append(tensors)
    for key, group in alike.items():
        if next(iter(group[0].values())).device.type != "cpu":
            yield examples[key], group
            continue
        batch: list[dict[str, Tensor]] = []
        room = BLOCK
        for tensors in group:
            for block in blocks(tensors):
                size = next(iter(block.values())).numel()
                if batch and size > room:
                    yield examples[key], batch
                    batch, room = [], BLOCK
                batch.append(block)
                room -= size
        yield examples[key], batch


def blocks(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Pieces of at most ``BLOCK`` elements, of tensors that are vectors."""
    first = next(iter(tensors.values()))
    if first.dim() != 1 or first.numel() <= BLOCK:
        yield tensors
        return
    split = {name: torch.split(x, BLOCK) for name, x in tensors.items()}
    for i in range(len(next(iter(split.values())))):
        yield {name: pieces[i] for name, pieces in split.items()}


def run_fused(rule: Rule, jobs: Sequence[Job], flags: Any) -> None:
    """Run a rule as one compiled kernel a parameter."""
    kernels: dict[Any, tuple[compiled.Kernel, Tensor]] = {}
    for job in jobs:
        inputs = vectors(job.tensors)
        if inputs is None:
            run_tensor_by_tensor(rule, [job], flags)
            continue
        views = tuple(inputs.values())
        device = views[0].device
        key = (id(job.scalars), tuple(inputs), tuple([view.dtype for view in views]), device)
        if key not in kernels:
            _, names, dtypes, _ = key
            numbers, structure = compiled.pack(compiled.Call(job.scalars, job.t), compiled.number_dtype(dtypes), device)
            kernel = compiled.kernel(rule, flags, structure, len(numbers), names, dtypes, device)
            kernels[key] = kernel, numbers
        kernel, numbers = kernels[key]
        if views[0].numel():
            kernel(*views, numbers)


_RUNNERS: Final = {
    Way.TENSOR_BY_TENSOR: run_tensor_by_tensor,
    Way.FOREACH: run_foreach,
    Way.FUSED: run_fused,
}
