"""Rules as compiled kernels, traced once per signature.

A rule is traced on vectors whose length is an argument, with its scalars in one small tensor. So
neither a new shape nor a new learning rate recompiles the kernel. A kernel ignores the tensors'
shapes and treats their memory as a vector; the caller checks that all of them are dense and in the
same order.

The graph goes directly to Inductor. ``torch.compile`` would compile the same graph, but check its
guards on every call: 61 µs per call instead of 8, and a step makes one call per parameter.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.execution.inductor import TRACING_LENGTH, Kernel, compiling, traced
from cprop.execution.tracked import values_read
from cprop.measures import Measure, for_cpu_kernels, is_built_in, measure_name
from cprop.rules import Rule, apply
from cprop.storage import Draw

__all__ = [
    "LONG",
    "Packed",
    "Rounding",
    "Signature",
    "cached",
    "get_kernel",
    "in_one_tensor",
    "measure_in_kernels",
    "pack",
]


logger: Final = logging.getLogger("cprop")

LONG: Final = 1 << 14
"""Number of elements from which a CPU kernel runs in parallel: waking other threads takes 10 to 50 µs."""


def flatten(scalars: tuple[Any, ...]) -> tuple[list[Number], tuple[Any, ...]]:
    """Split nested named tuples into their finite numbers and the remaining structure.

    Switches and infinite numbers stay in the structure: they select a formula (``c = inf``) and are not a value in one.
    """
    numbers: list[Number] = []

    def strip(x: tuple[Any, ...]) -> tuple[Any, ...]:
        structure: list[Any] = [type(x)]
        for item in x:
            if isinstance(item, tuple):
                structure.append(strip(item))
            elif isinstance(item, bool) or (isinstance(item, float) and math.isinf(item)):
                structure.append(item)
            else:
                structure.append(None)
                numbers.append(item)
        return tuple(structure)

    return numbers, strip(scalars)


def unflatten(numbers: Sequence[Any], structure: tuple[Any, ...]) -> Any:
    """Undo :func:`flatten`."""
    remaining = iter(numbers)

    def fill(x: Any) -> Any:
        if isinstance(x, tuple):
            return x[0](*(fill(item) for item in x[1:]))
        return next(remaining) if x is None else x

    return fill(structure)


def how_many(structure: tuple[Any, ...]) -> int:
    """How many numbers a structure contains."""
    return sum(how_many(item) if isinstance(item, tuple) else item is None for item in structure)


class Packed(NamedTuple):
    """A rule's scalars as one small tensor, and the structure they belong to."""

    numbers: Tensor
    structure: tuple[Any, ...]


def pack(scalars: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Packed:
    """Pack a rule's scalars for kernels on a device, as numbers of the given dtype."""
    numbers, structure = flatten(scalars)
    return Packed(in_one_tensor(numbers, dtype, device), structure)


def in_one_tensor(numbers: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor argument of a kernel, so that they are not compiled into it as constants."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in numbers])
    packed = torch.tensor(numbers, dtype=dtype, device="cpu")
    return packed if device.type == "cpu" else packed.to(device, non_blocking=True)


class Rounding(Enum):
    """What a kernel needs to know for its random bits, as further arguments."""

    NONE = "nothing"
    IN_ORDER = "the origin of a draw"
    SCATTERED = "its positions as well"


class Signature(NamedTuple):
    """What the inputs of a kernel have in common, besides the rule."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    threads: int
    """How many threads share the elements, on a CPU."""
    rounding: Rounding = Rounding.NONE

    @property
    def number_dtype(self) -> torch.dtype:
        """The dtype of the scalars: float64 if any tensor is, else float32."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32


_kernels: dict[Hashable, dict[Hashable, Kernel]] = {}


def cached(measure: str | Measure, key: Hashable, build: Callable[[], Kernel]) -> Kernel:
    """A kernel from the cache, compiled if it is missing.

    A measure may be any callable, even an unhashable one or a method of a large object. So kernels are cached by the
    measure's identity, and only for its lifetime; and by the values that it reads, which may be edited in mid-training.

    Args:
        measure: the measure that the kernel computes.
        key: everything else that distinguishes it from other kernels.
        build: compiles the kernel.
    """
    name: Hashable = measure if isinstance(measure, str) else id(measure)
    if not (isinstance(measure, str) or is_built_in(measure)):
        key = key, values_read(measure)
    kernels = _kernels.get(name, {})
    if key not in kernels:
        with compiling():
            if name not in _kernels and not isinstance(measure, str):
                try:
                    weakref.finalize(measure, _kernels.pop, name, None)
                except TypeError:  # no weak references, as for a named tuple: keep the object alive
                    _kernels[name] = {None: measure}
            kernels = _kernels.setdefault(name, {})
            if key not in kernels:
                if len(kernels) == _MANY:
                    logger.warning(
                        "compiling kernel %d for the measure %s: what it reads changes, and every time takes seconds; "
                        "fused=False follows without compiling",
                        _MANY + 1,
                        measure_name(measure),
                    )
                kernels[key] = build()
    return kernels[key]


_MANY: Final = 32
"""Number of kernels from which a measure is probably edited in every step."""


def get_kernel(rule: Rule, flags: Any, structure: tuple[Any, ...], signature: Signature) -> Kernel:
    """A function ``kernel(length, *tensors, numbers)`` that runs a rule and writes its results in place.

    A kernel that rounds has two more arguments: the positions before the numbers, if they are scattered, and the origin
    after them, both from :class:`cprop.storage.Draw`.

    Args:
        rule: the rule to compile.
        flags: its flags: a named tuple with the field ``measure``, or the measure alone.
        structure: the structure of its scalars, from :func:`pack`.
        signature: of its tensors, which are passed in the order of ``signature.names``.

    Raises:
        RuntimeError: if the kernel does not do what the rule does.
    """
    names, dtypes, device, threads, rounding = signature
    measure = getattr(flags, "measure", flags)

    def build() -> Kernel:
        logger.info("compiling %s for %s, which takes some seconds once per machine", rule.__name__, device)
        own: Any = measure_in_kernels(measure, device, signature.number_dtype)
        own = own if measure is flags else flags._replace(measure=own)

        def run(length: int, *arguments: Tensor) -> tuple[()]:
            tensors, others = arguments[: len(names)], list(arguments[len(names) :])
            draw = None
            if rounding is not Rounding.NONE:
                draw = Draw(others.pop()[0], others.pop(0) if rounding is Rounding.SCATTERED else None)
            apply(rule, dict(zip(names, tensors, strict=True)), unflatten(others[0].unbind(), structure), own, draw)
            return ()

        def example(length: int, some: Callable[..., Tensor]) -> list[Any]:
            tensors = [some(length, dtype=dtype, device=device) for dtype in dtypes]
            numbers = some(how_many(structure), dtype=signature.number_dtype, device=device)
            origin = torch.zeros(4, dtype=torch.int32, device=device)
            positions = torch.arange(length, dtype=torch.int32, device=device)
            before, after = [positions] if rounding is Rounding.SCATTERED else [], [origin]
            return [length, *tensors, *before, numbers, *(after if rounding is not Rounding.NONE else [])]

        # Equal sizes become one symbol in the graph, so all lengths equal the first argument.
        kernel = traced(run, example(TRACING_LENGTH, torch.empty), threads)
        if device.type == "cpu":
            try_out(rule.__name__, kernel, run, partial(example, _TRIED_LENGTH, some_numbers))
        return kernel

    others = None if measure is flags else flags._replace(measure=None)
    return cached(measure, (rule, others, structure, signature), build)


_TRIED_LENGTH: Final = 83
"""Some whole vectors, and a rest."""


def some_numbers(length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Different numbers between 0.1 and 0.9, in no order, that are the same every time."""
    x = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    return (x * 0.6180339887498949 % 1 * 0.8 + 0.1).to(dtype)


def try_out(name: str, kernel: Kernel, run: Kernel, example: Callable[[], list[Any]]) -> None:
    """Raise if a new kernel does not compute what it was compiled from, under whichever setting of torch.

    A kernel that returns without writing would count steps and train nothing.
    """
    expected, found = example(), example()
    with torch.no_grad():
        for i, x in enumerate(expected[1:], 1):  # different tensors, and the same in both
            if x.is_floating_point():
                for tensors in (expected, found):
                    tensors[i] = tensors[i].roll(7 * i)
        run(*expected)
        kernel(*found)
        pairs = [(a, b) for a, b in zip(expected[1:], found[1:], strict=True) if a.is_floating_point()]
        # A measure may jump: then rounding puts an element on its other side.
        right = [torch.isclose(a, b, rtol=0.02, atol=0.02, equal_nan=True).double().mean().item() for a, b in pairs]
    if min(right) < 0.9:
        raise RuntimeError(
            f"fused=True compiled a kernel for {name} that does not compute it ({1 - min(right):.0%} of the elements "
            "of a tensor are wrong): undo what you set for torch's compiler before this step, in "
            "torch._inductor.config or environment variables that begin with TORCH, or set fused=False"
        )


def measure_in_kernels(measure: str | Measure, device: torch.device, dtype: torch.dtype) -> str | Measure:
    """The form of a measure in a kernel for a device and dtype."""
    return for_cpu_kernels(measure) if device.type == "cpu" and dtype == torch.float32 else measure
