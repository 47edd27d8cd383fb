"""Rules as compiled kernels: traced once for each kind of input, and never again.

A rule is traced with its tensors as vectors of a length that is an argument, and its scalars as the
elements of one small tensor, so that neither another shape nor another learning rate is a new
kernel. A kernel never looks at a tensor's shape: it takes the memory from its beginning on, and the
caller has seen to it that all tensors fill theirs in the same order.

The graph goes to Inductor directly. ``torch.compile`` would hand it the same graph, and then check
at every call whether its guess about the caller's Python still holds: 61 µs a call here instead of
8, and a step makes one call a parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.conformity import Measure, for_cpu_kernels
from cprop.rules import Rule, apply

__all__ = ["LONG", "Call", "Kernel", "Kind", "Packed", "cached", "in_one_tensor", "kernel", "pack", "traced", "vector"]

Kernel = Callable[..., Any]


class Call(NamedTuple):
    """What a kernel is told besides its tensors: a rule's scalars, and the number of the step."""

    scalars: Any
    t: Number


LONG: Final = 1 << 14
"""From this many elements on, a loop on a CPU is worth waking other threads for, which takes 10 to 50 µs."""

_TRACING_LENGTH: Final = 1 << 20
"""Long enough for Inductor to decide that a loop is worth threads, unless it is told otherwise."""

_OPTIONS: Final = {
    # Multiply-adds may be contracted. Without it a step takes a fifth longer.
    "cpp.enable_floating_point_contract_flag": "fast",
    # The shapes are not to be looked at: see above.
    "size_asserts": False,
}


def flatten(scalars: tuple[Any, ...]) -> tuple[list[Number], tuple[Any, ...]]:
    """The finite numbers in nested named tuples, and what is left when they are taken out.

    A switch, or an infinite number, stays where it is: it chooses a formula (``c = inf``), not a value in one.
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
    """Put numbers back to where :func:`flatten` took them from."""
    remaining = iter(numbers)

    def fill(x: Any) -> Any:
        if isinstance(x, tuple):
            return x[0](*(fill(item) for item in x[1:]))
        return next(remaining) if x is None else x

    return fill(structure)


def how_many(structure: tuple[Any, ...]) -> int:
    """How many numbers a structure holds."""
    return sum(how_many(item) if isinstance(item, tuple) else item is None for item in structure)


class Packed(NamedTuple):
    """A call's numbers in one small tensor, and where each belongs."""

    numbers: Tensor
    structure: tuple[Any, ...]


def pack(call: Call, dtype: torch.dtype, device: torch.device) -> Packed:
    """Pack a call for kernels of a device whose scalars are of a dtype."""
    numbers, structure = flatten(call)
    return Packed(in_one_tensor(numbers, dtype, device), structure)


def in_one_tensor(numbers: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a kernel takes them: in its text they would be compiled into it."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in numbers])
    packed = torch.tensor(numbers, dtype=dtype, device="cpu")
    return packed if device.type == "cpu" else packed.to(device, non_blocking=True)


class Kind(NamedTuple):
    """What the inputs of one kernel have in common, besides the rule."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    long: bool
    """Whether they have ``LONG`` elements or more."""

    @property
    def number_dtype(self) -> torch.dtype:
        """Scalars are float64 if anything is."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32


_kernels: dict[Hashable, dict[Hashable, Kernel]] = {}
_compiling: Final = Lock()


def cached(measure: str | Measure, key: Hashable, build: Callable[[], Kernel]) -> Kernel:
    """A kernel from the cache, compiled if it is not there.

    A measure may be any callable: one that cannot be hashed, or a method of a large object. So kernels are kept by the
    measure's identity, and only as long as it lives.

    Args:
        measure: what the kernel computes the conformity by.
        key: everything else that tells it from other kernels.
        build: compiles it.
    """
    name: Hashable = measure if isinstance(measure, str) else id(measure)
    kernels = _kernels.get(name, {})
    if key not in kernels:
        with _compiling:  # one thread at a time: Inductor is not made for two
            if name not in _kernels and not isinstance(measure, str):
                try:
                    weakref.finalize(measure, _kernels.pop, name, None)
                except TypeError:  # an object without weak references, such as a named tuple: it has to stay
                    _kernels[name] = {None: measure}
            kernels = _kernels.setdefault(name, {})
            if key not in kernels:
                kernels[key] = build()
    return kernels[key]


def kernel(rule: Rule, flags: Any, structure: tuple[Any, ...], kind: Kind) -> Kernel:
    """A function ``kernel(length, *tensors, numbers)`` that runs a rule and writes its results in place.

    Args:
        rule: the rule to compile.
        flags: its flags, the measure among them.
        structure: of its scalars, from :func:`pack`.
        kind: of its tensors, which will be given in the order of ``kind.names``.
    """
    names, dtypes, device, long = kind

    def build() -> Kernel:
        own = flags._replace(measure=measure_in_kernels(flags.measure, device, kind.number_dtype))

        def run(length: int, *arguments: Tensor) -> tuple[()]:
            *tensors, numbers = arguments
            call: Call = unflatten(numbers.unbind(), structure)
            apply(rule, dict(zip(names, tensors, strict=True)), call.scalars, own, call.t)
            return ()

        # Sizes that are equal here are one symbol in the graph: all lengths are the first argument.
        example: list[Any] = [
            _TRACING_LENGTH,
            *(vector(device, dtype) for dtype in dtypes),
            torch.empty(how_many(structure), dtype=kind.number_dtype, device=device),
        ]
        return traced(run, example, threads=long)

    return cached(flags.measure, (rule, flags._replace(measure=None), structure, kind), build)


def measure_in_kernels(measure: str | Measure, device: torch.device, dtype: torch.dtype) -> str | Measure:
    """The measure as a kernel computes it on a device, in a precision."""
    return for_cpu_kernels(measure) if device.type == "cpu" and dtype == torch.float32 else measure


def traced(run: Callable[..., Any], example: list[Any], threads: bool) -> Kernel:
    """Compile a function of a length, tensors and one tensor of numbers; the example's sizes are not its own.

    Args:
        run: the function.
        example: arguments such as it will get; vectors as long as :data:`_TRACING_LENGTH`, and the numbers last.
        threads: whether it may wake other threads on a CPU.

    Raises:
        RuntimeError: if there is no working compiler, or no folder to compile in.
    """
    # Importing these takes a second, and most programs never need it.
    import torch._inductor
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch.fx.experimental.proxy_tensor import make_fx

    options = {"config_patches": _OPTIONS if threads else {**_OPTIONS, "cpp.threads": 1}}
    try:
        with torch.no_grad():
            graph = make_fx(run, tracing_mode="symbolic")(*example)
            return torch._inductor.standalone_compile(graph, example, dynamic_shapes="from_graph", options=options)
    except Exception as error:
        causes = list(chain_of(error))
        if any(isinstance(cause, InvalidCxxCompiler | CppCompileError) for cause in causes):
            raise RuntimeError(
                "fused=True compiles C++, and no compiler works here: install one (Debian: apt install g++), name "
                f"yours in the environment variable CXX, or set fused=False ({error})"
            ) from error
        if any(isinstance(cause, OSError) for cause in causes):
            raise RuntimeError(
                "fused=True keeps compiled kernels in a folder, and cannot write there: name another one in the "
                f"environment variable TORCHINDUCTOR_CACHE_DIR, or set fused=False ({error})"
            ) from error
        raise


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def vector(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector to trace with."""
    return torch.empty(_TRACING_LENGTH, dtype=dtype, device=device)
