"""Inductor's internals: the options that kernels are compiled with, and how their loops are written.

Nothing here changes Inductor for anyone else. Options apply to one compilation, and our loops are subclasses that one
of these options brings along, so they are part of the key under which Inductor keeps compiled code.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, Final

__all__ = ["options"]

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
    """A pass over Inductor's schedule that lets CPU kernels be written by :class:`Scheduling`; None if it cannot be.

    It makes them process two vectors at a time, and reinterpret the bits of a whole vector. With one vector at a time,
    memory waits for a long chain of arithmetic: a step takes a fifth longer. bfloat16 state then fills half a vector,
    and every load waits for the store before: it takes half as long again. By itself, Inductor copies a vector's
    elements one by one to reinterpret their bits, as stochastic rounding does.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    if not all(hasattr(*part) for part in ((cpp, "TilingSelect"), (cpp.CppScheduling, "kernel_proxy_cls"))):
        return None

    class Overrides(cpp.CppVecOverrides):
        def __new__(cls, *arguments: Any, **kwargs: Any) -> Any:
            self: Any = super().__new__(cls, *arguments, **kwargs)  # type: ignore[no-untyped-call]
            one_by_one = self.to_dtype_bitcast

            def to_dtype_bitcast(x: Any, dtype: Any, src_dtype: Any) -> Any:
                if getattr(x, "is_vec", False):
                    return f"c10::bit_cast<{V.kernel._get_vec_type(dtype)}>({x})"
                return one_by_one(x, dtype, src_dtype)

            self.to_dtype_bitcast = to_dtype_bitcast
            return self

    class VecKernel(cpp.CppVecKernel):
        overrides = Overrides

        def arange(self, index: Any, stride: Any) -> Any:
            # A number plus a constant vector: by itself, it computes every element of its own.
            vector = self._get_vec_type(index.dtype)
            found: Any = self.cse.generate(self.compute, f"{vector}({index}) + {vector}::arange(0, {stride})")
            found.dtype, found.is_vec = index.dtype, True
            return found

    class TwoVectors(cpp.TilingSelect):
        def select_tiling(self, *arguments: Any) -> Any:
            factors, *rest = super().select_tiling(*arguments)
            return [2 * factor for factor in factors], *rest

    # The method creates a TilingSelect by its name, so this copy of it looks up that name elsewhere.
    method: Any = cpp.CppKernelProxy.codegen_functions
    names = {**method.__globals__, "TilingSelect": TwoVectors}

    class Proxy(cpp.CppKernelProxy):
        vec_kernel_cls = VecKernel
        codegen_functions = FunctionType(
            method.__code__, names, method.__name__, method.__defaults__, method.__closure__
        )

    class Scheduling(cpp.CppScheduling):
        kernel_proxy_cls = Proxy

    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class BetterLoops(base):  # type: ignore[misc]
        def __call__(self, nodes: Any) -> Any:
            backends = nodes[0].scheduler.backends
            for device, backend in backends.items():
                if type(backend) is cpp.CppScheduling:
                    backends[device] = Scheduling(backend.scheduler)  # type: ignore[no-untyped-call]
            return nodes

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((__file__,))

    return BetterLoops()
