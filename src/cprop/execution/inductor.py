"""What reaches into Inductor: a function becomes a kernel here, and nowhere else.

Nothing here changes Inductor for anyone else. Options apply to one compilation, and our loops are subclasses that one
of these options brings along, so they are part of the key under which Inductor keeps compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["TRACING_LENGTH", "Kernel", "compiling", "traced", "unavailable", "vector"]


Kernel = Callable[..., Any]

TRACING_LENGTH: Final = 1 << 20
"""Long enough for Inductor to parallelize the loop, unless it is told not to."""


def unavailable() -> str:
    """Why this torch cannot compile kernels, and what to do instead; empty if it can."""
    import torch._inductor

    if hasattr(torch._inductor, "standalone_compile"):
        return ""
    return (
        "fused=True needs torch._inductor.standalone_compile, which torch "
        f"{torch.__version__} does not have: install torch 2.8 or later, or set fused=False"
    )


@contextmanager
def compiling() -> Iterator[None]:
    """Hold the lock that every ``torch.compile`` holds: Inductor is not thread-safe, and options are its globals.

    Raises:
        RuntimeError: if this torch cannot compile kernels.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    from torch._dynamo.convert_frame import compile_lock  # here, because it takes a second

    with compile_lock:
        yield


def traced(run: Callable[..., Any], example: list[Any], threads: int) -> Kernel:
    """Compile a function of a length, vectors and one tensor of numbers, for vectors of any length.

    Args:
        run: the function.
        example: example arguments: vectors of length :data:`TRACING_LENGTH`, and the numbers last.
        threads: how many threads the kernel uses on a CPU.

    Raises:
        RuntimeError: if this torch cannot do it, or there is no working compiler, or no writable cache folder.
    """
    # These imports take a second, and most programs do not need them.
    import torch._inductor
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with compiling(), torch.no_grad():
            graph = make_fx(run, tracing_mode="symbolic")(*example)
            choose_products(graph.graph)
            graph.recompile()
            return torch._inductor.standalone_compile(
                graph, example, dynamic_shapes="from_graph", options={"config_patches": options(threads)}
            )
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


def vector(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector to trace with."""
    return torch.empty(TRACING_LENGTH, dtype=dtype, device=device)


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


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_OPTIONS: Final[dict[str, Any]] = {
    # Allow fused multiply-adds, where there is but one way: see choose_products. Without them a step takes 20 % longer.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Kernels ignore shapes.
    "size_asserts": False,
}

_FROM_THE_ENVIRONMENT: Final[dict[str, Any]] = {
    "cpp_wrapper": False,  # its kernels would write into copies
    "fx_wrapper": False,
    "use_fast_math": False,
    "freezing": False,
    "memory_planning": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "nan_asserts": False,
    "runtime_triton_nan_asserts": False,
    "save_args": False,
    "disabled_passes": "",
    "emulate_precision_casts": False,
    "eager_numerics.division_rounding": False,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_tiling_heuristics": True,
    "cpp.no_redundant_loops": True,
    "cpp.dynamic_threads": False,
    "cpp.min_chunk_size": 512,
    "cpp.use_decompose_tanh": False,
    "cpp.enable_kernel_profile": False,
    "triton.cudagraphs": False,
    "triton.multi_kernel": 0,
    "triton.skip_l1_cache": False,
}
"""Options with a default from an environment variable, as they are without one."""

_OF_THE_MACHINE: Final = (
    *("compile_", "worker_", "quiesce_", "precompilation_", "file_lock_", "cpp_cache", "fx_graph_", "global_cache"),
    *("autotune_local", "autotune_remote", "bundled_autotune", "bundle_triton", "remote_", "non_blocking_remote"),
    *(
        "cpp.cxx",
        "cpp.march",
        "cpp.vec_isa_ok",
        "cuda.",
        "cutlass",
        "rocm.",
        "xpu.",
        "halide.",
        "mtia.",
        "aot_",
        "trace.",
    ),
    *(
        "debug",
        "verbose_",
        "disable_progress",
        "developer_",
        "log_",
        "profile",
        "enabled_metric",
        "is_",
        "test_configs.",
    ),
    *("_save", "_cache", "_profile", "_raise", "TYPE_CHECKING"),
)
"""Beginnings of options that concern the machine and what is reported, and not what a kernel does: the user's hold."""


def options(threads: int) -> dict[str, Any]:
    """Options for Inductor, as ``config_patches``: torch's own defaults, whatever the user set for other code.

    Args:
        threads: number of threads of a kernel on a CPU.
    """
    from torch._inductor import config

    known: dict[str, Any] = config._config  # type: ignore[attr-defined]
    chosen = {
        name: option.default
        for name, option in known.items()
        if option.alias is None and not name.startswith(_OF_THE_MACHINE) and getattr(config, name) != option.default
    }
    ours = {**_FROM_THE_ENVIRONMENT, **_OPTIONS, "cpp.threads": threads, "_pre_fusion_custom_pass": better_loops()}
    return {**chosen, **{name: value for name, value in ours.items() if name in known}}


@cache
def better_loops() -> Any:
    """A pass over Inductor's schedule that lets CPU kernels be written by our subclasses; None if it cannot be.

    They process two vectors at a time, and reinterpret the bits of a whole vector. With one vector at a time, memory
    waits for a long chain of arithmetic: a step takes a fifth longer. bfloat16 state then fills half a vector, and
    every load waits for the store before: it takes half as long again.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.codegen import cpp

    if not all(hasattr(*part) for part in ((cpp, "TilingSelect"), (cpp.CppScheduling, "kernel_proxy_cls"))):
        return None
    scheduling = two_vectors_at_a_time(cpp, whole_vectors(cpp))
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class BetterLoops(base):  # type: ignore[misc]
        def __call__(self, nodes: Any) -> Any:
            backends = nodes[0].scheduler.backends
            for device, backend in backends.items():
                if type(backend) is cpp.CppScheduling:
                    backends[device] = scheduling(backend.scheduler)
            return nodes

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((__file__,))

    return BetterLoops()


def whole_vectors(cpp: Any) -> Any:
    """Inductor's vectorized kernel, without two loops over a vector's elements that it has for stochastic rounding."""
    from torch._inductor.virtualized import V

    class Overrides(cpp.CppVecOverrides):  # type: ignore[misc]
        def __new__(cls, *arguments: Any, **kwargs: Any) -> Any:
            self: Any = super().__new__(cls, *arguments, **kwargs)
            one_by_one = self.to_dtype_bitcast

            def to_dtype_bitcast(x: Any, dtype: Any, src_dtype: Any) -> Any:
                if getattr(x, "is_vec", False):
                    return f"c10::bit_cast<{V.kernel._get_vec_type(dtype)}>({x})"
                return one_by_one(x, dtype, src_dtype)

            self.to_dtype_bitcast = to_dtype_bitcast
            return self

    class VecKernel(cpp.CppVecKernel):  # type: ignore[misc]
        overrides = Overrides

        def arange(self, index: Any, stride: Any) -> Any:
            # A number plus a constant vector: by itself, it computes every element of its own.
            vector = self._get_vec_type(index.dtype)
            found: Any = self.cse.generate(self.compute, f"{vector}({index}) + {vector}::arange(0, {stride})")
            found.dtype, found.is_vec = index.dtype, True
            return found

    return VecKernel


def two_vectors_at_a_time(cpp: Any, vec_kernel: Any) -> Any:
    """Inductor's scheduling of loops on a CPU, with twice its tiling factor and our vectorized kernel."""

    class TwoVectors(cpp.TilingSelect):  # type: ignore[misc]
        def select_tiling(self, *arguments: Any) -> Any:
            factors, *rest = super().select_tiling(*arguments)
            return [2 * factor for factor in factors], *rest

    # The method creates a TilingSelect by its name, so this copy of it looks up that name elsewhere.
    method: Any = cpp.CppKernelProxy.codegen_functions
    names = {**method.__globals__, "TilingSelect": TwoVectors}

    class Proxy(cpp.CppKernelProxy):  # type: ignore[misc]
        vec_kernel_cls = vec_kernel
        codegen_functions = FunctionType(
            method.__code__, names, method.__name__, method.__defaults__, method.__closure__
        )

    class Scheduling(cpp.CppScheduling):  # type: ignore[misc]
        kernel_proxy_cls = Proxy

    return Scheduling
