"""Rules as compiled kernels, one launch per parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from cprop.execution.for_loop import run_for_loop
from cprop.execution.inductor import Kernel
from cprop.execution.job import Job, Row, dtype_of, elements, in_one_order, run_all
from cprop.execution.kernels import LONG, Packed, Rounding, Signature, get_kernel, pack
from cprop.rules import Rule, rounds
from cprop.sharding import PLAIN, positions
from cprop.storage import origins

__all__ = ["prepare_fused"]


def prepare_fused(rule: Rule, job: Job, flags: Any) -> Callable[[], None]:
    """Look up or compile a rule's kernels; one is launched per parameter.

    This loop dominates a step with many small parameters, so it uses ``map`` over C functions.
    """
    packed: dict[Any, Packed] = {}
    kernels: dict[Signature, tuple[Kernel, Tensor]] = {}
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
        count, device, dtypes = inputs[0].numel(), inputs[0].device, tuple(map(dtype_of, inputs))
        first, rounding = None, Rounding.NONE
        if dtypes not in rounding_of:
            rounding_of[dtypes] = rounds(job.names, inputs)
        if rounding_of[dtypes]:
            first, rounding = 0 if plain else positions(row[0]), Rounding.IN_ORDER
            if isinstance(first, Tensor):
                inputs, first, rounding = (*inputs, first), 0, Rounding.SCATTERED
        in_parallel = threads if count >= LONG and device.type == "cpu" else 1
        signature = Signature(job.names, dtypes, device, in_parallel, rounding)
        if signature not in kernels:
            where = (signature.number_dtype, device)
            if where not in packed:
                packed[where] = pack(job.scalars, *where)
            numbers, structure = packed[where]
            kernels[signature] = get_kernel(rule, flags, structure, signature), numbers
        kernel, numbers = kernels[signature]
        if count and first is None:
            calls.append(partial(kernel, count, *inputs, numbers))
        elif count:
            rounded[device].append((partial(kernel, count, *inputs, numbers), seed, cast("int", first)))
    for device, items in rounded.items():
        launches, seeds, firsts = zip(*items, strict=True)
        calls += map(partial, launches, origins(job.t, seeds, firsts, device))
    return partial(run_all, calls)


def are_plain(rows: list[Row]) -> bool:
    """Whether tensors can be passed to a kernel unchanged: not sharded, real, and contiguous."""
    tensors = list(chain.from_iterable(rows))
    plain = PLAIN.issuperset(map(type, tensors)) and all(map(Tensor.is_contiguous, tensors))
    return plain and not any(map(Tensor.is_complex, tensors))
