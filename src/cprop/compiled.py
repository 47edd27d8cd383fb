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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import Number
from cprop.measures import Measure, for_cpu_kernels
from cprop.rules import Rule, apply

__all__ = [
    "LONG",
    "Call",
    "Kernel",
    "Packed",
    "Signature",
    "cached",
    "get_kernel",
    "in_one_tensor",
    "pack",
    "traced",
    "unavailable",
    "vector",
]

Kernel = Callable[..., Any]

logger: Final = logging.getLogger("cprop")


class Call(NamedTuple):
    """A kernel's arguments besides its tensors: the rule's scalars, and the step."""

    scalars: Any
    t: Number


LONG: Final = 1 << 14
"""Number of elements from which a CPU kernel runs in parallel: waking other threads takes 10 to 50 µs."""

_TRACING_LENGTH: Final = 1 << 20
"""Long enough for Inductor to parallelize the loop, unless it is told not to."""

_OPTIONS: Final = {
    # Allow fused multiply-adds, where there is but one way: see choose_products. Without them a step takes 20 % longer.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Kernels ignore shapes: see above.
    "size_asserts": False,
    # Kernels are kept on disk by their options: this one changes nothing, and tells those of better_loops apart.
    "cpp.min_chunk_size": 1024,
}


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
    """A call's numbers in one small tensor, and the structure they belong to."""

    numbers: Tensor
    structure: tuple[Any, ...]


def pack(call: Call, dtype: torch.dtype, device: torch.device) -> Packed:
    """Pack a call for kernels on a device, with scalars of the given dtype."""
    numbers, structure = flatten(call)
    return Packed(in_one_tensor(numbers, dtype, device), structure)


def in_one_tensor(numbers: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor argument of a kernel, so that they are not compiled into it as constants."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in numbers])
    packed = torch.tensor(numbers, dtype=dtype, device="cpu")
    return packed if device.type == "cpu" else packed.to(device, non_blocking=True)


class Signature(NamedTuple):
    """What the inputs of a kernel have in common, besides the rule."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    long: bool
    """Whether they have at least ``LONG`` elements."""

    @property
    def number_dtype(self) -> torch.dtype:
        """The dtype of the scalars: float64 if any tensor is, else float32."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32


_kernels: dict[Hashable, dict[Hashable, Kernel]] = {}
_compiling: Final = Lock()


def cached(measure: str | Measure, key: Hashable, build: Callable[[], Kernel]) -> Kernel:
    """A kernel from the cache, compiled if it is missing.

    A measure may be any callable, even an unhashable one or a method of a large object. So kernels are cached by the
    measure's identity, and only for its lifetime.

    Args:
        measure: the measure that the kernel computes.
        key: everything else that distinguishes it from other kernels.
        build: compiles the kernel.
    """
    name: Hashable = measure if isinstance(measure, str) else id(measure)
    kernels = _kernels.get(name, {})
    if key not in kernels:
        with _compiling:  # Inductor is not thread-safe
            if name not in _kernels and not isinstance(measure, str):
                try:
                    weakref.finalize(measure, _kernels.pop, name, None)
                except TypeError:  # no weak references, as for a named tuple: keep the object alive
                    _kernels[name] = {None: measure}
            kernels = _kernels.setdefault(name, {})
            if key not in kernels:
                kernels[key] = build()
    return kernels[key]


def get_kernel(rule: Rule, flags: Any, structure: tuple[Any, ...], signature: Signature) -> Kernel:
    """A function ``kernel(length, *tensors, numbers)`` that runs a rule and writes its results in place.

    Args:
        rule: the rule to compile.
        flags: its flags: a named tuple with the field ``measure``, or the measure alone.
        structure: the structure of its scalars, from :func:`pack`.
        signature: of its tensors, which are passed in the order of ``signature.names``.
    """
    names, dtypes, device, long = signature
    measure = getattr(flags, "measure", flags)

    def build() -> Kernel:
        logger.info("compiling %s for %s, which takes some seconds once per machine", rule.__name__, device)
        own: Any = measure_in_kernels(measure, device, signature.number_dtype)
        own = own if measure is flags else flags._replace(measure=own)

        def run(length: int, *arguments: Tensor) -> tuple[()]:
            *tensors, numbers = arguments
            call: Call = unflatten(numbers.unbind(), structure)
            apply(rule, dict(zip(names, tensors, strict=True)), call.scalars, own, call.t)
            return ()

        # Equal sizes become one symbol in the graph, so all lengths equal the first argument.
        example: list[Any] = [
            _TRACING_LENGTH,
            *(vector(device, dtype) for dtype in dtypes),
            torch.empty(how_many(structure), dtype=signature.number_dtype, device=device),
        ]
        return traced(run, example, threads=long)

    others = None if measure is flags else flags._replace(measure=None)
    return cached(measure, (rule, others, structure, signature), build)


def measure_in_kernels(measure: str | Measure, device: torch.device, dtype: torch.dtype) -> str | Measure:
    """The form of a measure in a kernel for a device and dtype."""
    return for_cpu_kernels(measure) if device.type == "cpu" and dtype == torch.float32 else measure


def unavailable() -> str:
    """Why this torch cannot compile kernels, and what to do instead; empty if it can."""
    import torch._inductor

    if hasattr(torch._inductor, "standalone_compile"):
        return ""
    return (
        "fused=True needs torch._inductor.standalone_compile, which torch "
        f"{torch.__version__} does not have: install torch 2.8 or later, or set fused=False"
    )


def traced(run: Callable[..., Any], example: list[Any], threads: bool) -> Kernel:
    """Compile a function of a length, vectors and one tensor of numbers, for vectors of any length.

    Args:
        run: the function.
        example: example arguments: vectors of length :data:`_TRACING_LENGTH`, and the numbers last.
        threads: whether the kernel may use several threads on a CPU.

    Raises:
        RuntimeError: if this torch cannot do it, or there is no working compiler, or no writable cache folder.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    # These imports take a second, and most programs do not need them.
    import torch._inductor
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch.fx.experimental.proxy_tensor import make_fx

    options = {"config_patches": _OPTIONS if threads else {**_OPTIONS, "cpp.threads": 1}}
    try:
        with torch.no_grad(), better_loops():
            graph = make_fx(run, tracing_mode="symbolic")(*example)
            choose_products(graph.graph)
            graph.recompile()
            return torch._inductor.standalone_compile(graph, example, dynamic_shapes="from_graph", options=options)
    except Exception as error:
        causes = list(chain_of(error))
        if any(isinstance(cause, InvalidCxxCompiler | CppCompileError) for cause in causes):
            raise RuntimeError(
                "fused=True needs a C++ compiler, and none works here: install one (Debian: apt install g++), set the "
                f"environment variable CXX to yours, or set fused=False ({error})"
            ) from error
        if any(isinstance(cause, OSError) for cause in causes):
            raise RuntimeError(
                "fused=True cannot write to its folder for compiled kernels: set the environment variable "
                f"TORCHINDUCTOR_CACHE_DIR to a writable folder, or set fused=False ({error})"
            ) from error
        raise


def choose_products(graph: torch.fx.Graph) -> None:
    """Fuse the first product into every sum of two products; the second is rounded.

    Left to itself, the compiler chooses for every loop anew, and the last elements of a tensor have a loop of their
    own. Where GCC does not know the processor, their results depend on how long the tensor is, and those of a shard on
    where it was cut. Sums of integers stay as they are: a fused one is computed in floating point.
    """
    from torch._inductor.inductor_prims import fma

    add, multiply = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    for node in list(graph.nodes):
        products = [x for x in node.args if isinstance(x, torch.fx.Node) and x.target is multiply]
        if node.target is add and len(products) == 2 and not node.kwargs and node.meta["val"].is_floating_point():
            first, second = products
            with graph.inserting_before(node):
                total = graph.call_function(fma, (*first.args, second))
            node.replace_all_uses_with(total)
            for replaced in (node, first):
                if not replaced.users:
                    graph.erase_node(replaced)


@contextmanager
def better_loops() -> Iterator[None]:
    """Let Inductor's CPU kernels process two vectors at a time, and reinterpret the bits of a whole vector.

    With one vector at a time, memory waits for a long chain of arithmetic: a step takes a fifth longer. bfloat16 state
    then fills half a vector, and every load waits for the store before: it takes half as long again. By itself,
    Inductor copies a vector's elements one by one to reinterpret their bits, as stochastic rounding does.
    """
    from torch._inductor.codegen.cpp import CppVecOverrides, TilingSelect
    from torch._inductor.virtualized import V

    def to_dtype_bitcast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> str:
        return f"c10::bit_cast<{V.kernel._get_vec_type(dtype)}>({x})"

    def select_tiling(self: Any, *arguments: Any) -> tuple[Any, ...]:
        factors, *rest = select(self, *arguments)
        return [2 * factor for factor in factors], *rest

    bitcast, select = CppVecOverrides.to_dtype_bitcast, TilingSelect.select_tiling
    CppVecOverrides.to_dtype_bitcast = staticmethod(to_dtype_bitcast)  # type: ignore[method-assign]
    TilingSelect.select_tiling = select_tiling  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CppVecOverrides.to_dtype_bitcast = bitcast  # type: ignore[method-assign]
        TilingSelect.select_tiling = select  # type: ignore[method-assign]


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def vector(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector to trace with."""
    return torch.empty(_TRACING_LENGTH, dtype=dtype, device=device)
