"""Runs rules over tensors: as a for-loop, foreach, or fused."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from shutil import which
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from cprop import compiled
from cprop.arithmetic import Number, is_fake
from cprop.measures import is_built_in
from cprop.rules import Rule, apply, rounds, with_finite_grad, write
from cprop.sharding import PLAIN, local, positions
from cprop.storage import Draw, load, origins
from cprop.tensor_list import TensorList

__all__ = ["Implementation", "Job", "check_implementation", "choose_implementation", "prepare", "run_all"]

logger: Final = logging.getLogger("cprop")

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


class Implementation(Enum):
    """The implementations of a rule. Results are the same up to rounding."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FUSED = "fused"


def choose_implementation(params: Sequence[Tensor], foreach: bool | None, fused: bool | None) -> Implementation:
    """The implementation that torch would choose for these parameters and flags."""
    check_implementation(foreach, fused)
    if fused:
        return Implementation.FUSED
    if foreach is None and fused is None:
        _, foreach = _default_to_fused_or_foreach(list(params), differentiable=False)
        if not foreach and not torch.compiler.is_compiling() and params and params[0].device.type == "cpu":
            recommend_fused()
    return Implementation.FOREACH if foreach else Implementation.FOR_LOOP


def check_implementation(foreach: bool | None, fused: bool | None) -> None:
    """Raise if two implementations are asked for."""
    if foreach and fused:
        raise RuntimeError("foreach=True and fused=True are mutually exclusive: set only one of them")


@cache
def recommend_fused() -> None:
    """Say once that there is a faster implementation, if there is."""
    if which(os.environ.get("CXX", "g++")):
        logger.info("running a CPU step as a for-loop; with fused=True it is several times faster, compiled once")


def prepare(rule: Rule, jobs: Iterable[Job], flags: Any, implementation: Implementation) -> list[Callable[[], None]]:
    """Prepare a rule for the parameters of a group, and return the functions that run it.

    Everything that can fail happens here, such as checking tensors and compiling kernels. So a step either updates
    all parameters or none.
    """
    jobs = list(jobs)
    fused = implementation is Implementation.FUSED
    if torch.compiler.is_compiling() or (fused and any(is_fake(job.rows[0][0]) for job in jobs)):
        # The caller traces the whole step, so run the rule itself.
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


SLICE: Final = 1 << 17
"""Number of elements of a large CPU tensor that a rule is run on at a time, so that temporaries stay in the cache."""


def run_for_loop(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule as a for-loop over parameters: the reference implementation."""
    built_in = is_built_in(getattr(flags, "measure", flags)) and not torch.compiler.is_compiling()
    for row, seed in job.items():
        inputs = tuple(map(elements, row))
        flat = built_in and in_one_order(inputs)
        draw = job.draw(row, seed, flat)
        for part, of_part in slices(tuple(map(as_vector, inputs)), draw) if flat else ((inputs, draw),):
            apply(rule, dict(zip(job.names, part, strict=True)), job.scalars, flags, of_part)


def slices(row: Row, draw: Draw | None) -> Iterable[tuple[Row, Draw | None]]:
    """Vectors on the CPU in parts of ``SLICE`` elements, with the draw of each part; others as they are."""
    if row[0].numel() <= SLICE or row[0].device.type != "cpu":
        yield row, draw
        return
    for start in range(0, row[0].numel(), SLICE):
        yield tuple(x[start : start + SLICE] for x in row), draw and draw.part(start, SLICE)


def as_vector(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def draw_of(tensor: Tensor, t: Number, seed: int, flat: bool) -> Draw:
    """What the random bits of a tensor's elements depend on; see :meth:`Job.draw`."""
    place, shard = positions(tensor), elements(tensor)
    if isinstance(place, Tensor):
        return Draw.of(t, seed, positions=as_vector(place) if flat else place)
    if flat or shard.is_contiguous() or not is_dense(shard):
        return Draw.of(t, seed, place)
    in_memory = torch.empty_like(shard, dtype=torch.int32)
    as_vector(in_memory).copy_(torch.arange(shard.numel(), device=shard.device))
    return Draw.of(t, seed, place, in_memory)


LOOPED: Final = {"cpu"}
"""Device types without foreach kernels: torch runs a for-loop there, and so does CProp, in slices."""


def run_foreach(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on lists of tensors, where the device has kernels for lists."""
    looped: list[tuple[Row, int]] = []
    alike: defaultdict[Any, list[tuple[Row, int]]] = defaultdict(list)
    for row, seed in job.items():
        if row[0].device.type in LOOPED:
            looped.append((row, seed))
        else:
            alike[(row[0].device, *map(_DTYPE, row))].append((row, seed))
    run_for_loop(rule, job.only(looped), flags)
    for items in alike.values():
        run_lists(rule, job.only(items), flags)


def run_lists(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule on the columns of a job; each is a list of tensors with the same dtype and device."""
    rows = [tuple(map(elements, row)) for row in job.rows]
    flat = list(map(in_one_order, rows))
    rows = [tuple(map(as_vector, row)) if as_vectors else row for row, as_vectors in zip(rows, flat, strict=True)]
    stored = dict(zip(job.names, map(list, zip(*rows, strict=True)), strict=True))
    # A TensorList supports every operation that a rule uses, but is not a Tensor for the type checker.
    working = {name: cast("Tensor", TensorList([load(x) for x in column])) for name, column in stored.items()}
    updated = rule(with_finite_grad(working), job.scalars, flags)
    results = {name: cast("TensorList", value).tensors for name, value in updated.items()}
    alike = {name for name, column in results.items() if column[0].dtype == stored[name][0].dtype}
    for name in alike:
        torch._foreach_copy_(stored[name], results[name])
    if alike != results.keys():
        for i, (row, seed) in enumerate(job.items()):
            others = {name: column[i] for name, column in results.items() if name not in alike}
            write({name: stored[name][i] for name in others}, others, job.draw(row, seed, flat[i]))


_DTYPE: Final = attrgetter("dtype")


def prepare_fused(rule: Rule, job: Job, flags: Any) -> Callable[[], None]:
    """Look up or compile a rule's kernels; one is launched per parameter.

    This loop dominates a step with many small parameters, so it uses ``map`` over C functions.
    """
    packed: dict[Any, compiled.Packed] = {}
    kernels: dict[compiled.Signature, tuple[compiled.Kernel, Tensor]] = {}
    rounding_of: dict[tuple[torch.dtype, ...], bool] = {}
    calls: list[Callable[[], object]] = []
    rounded: defaultdict[torch.device, list[tuple[partial[object], int, int]]] = defaultdict(list)
    plain, threads = are_plain(job.rows), torch.get_num_threads()
    for row, seed in job.items():
        inputs = row
        if not plain:
            inputs = tuple(map(elements, row))
            if not in_one_order(inputs):
                calls.append(partial(run_for_loop, rule, job.only([(row, seed)]), flags))
                continue
        count, device, dtypes = inputs[0].numel(), inputs[0].device, tuple(map(_DTYPE, inputs))
        first, rounding = None, compiled.Rounding.NONE
        if dtypes not in rounding_of:
            rounding_of[dtypes] = rounds(job.names, inputs)
        if rounding_of[dtypes]:
            first, rounding = 0 if plain else positions(row[0]), compiled.Rounding.IN_ORDER
            if isinstance(first, Tensor):
                inputs, first, rounding = (*inputs, first), 0, compiled.Rounding.SCATTERED
        in_parallel = threads if count >= compiled.LONG and device.type == "cpu" else 1
        signature = compiled.Signature(job.names, dtypes, device, in_parallel, rounding)
        if signature not in kernels:
            place = (signature.number_dtype, device)
            if place not in packed:
                packed[place] = compiled.pack(job.scalars, *place)
            numbers, structure = packed[place]
            kernels[signature] = compiled.get_kernel(rule, flags, structure, signature), numbers
        kernel, numbers = kernels[signature]
        if count and first is None:
            calls.append(partial(kernel, count, *inputs, numbers))
        elif count:
            rounded[device].append((partial(kernel, count, *inputs, numbers), seed, cast("int", first)))
    for device, items in rounded.items():
        launches, seeds, firsts = zip(*items, strict=True)
        calls += map(partial, launches, origins(job.t, seeds, firsts, device))
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
