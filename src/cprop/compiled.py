"""Rules as compiled kernels: traced once for each kind of input, and never again.

A rule is traced with its tensors as flat vectors of unknown length and its scalars as the elements
of one small tensor, so that neither another shape nor another learning rate is a new kernel. The
graph goes to Inductor directly. ``torch.compile`` would hand it the same graph, and then check at
every call whether its guess about the caller's Python still holds: 61 µs a call here instead of 12,
and a step makes one call a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop import eight_bit
from cprop.arithmetic import Number, expanded_functions
from cprop.rules import Rule, apply

__all__ = ["Call", "Kernel", "kernel", "number_dtype", "pack"]

Kernel = Callable[..., object]


class Call(NamedTuple):
    """What a kernel is told besides its tensors: a rule's scalars, and the number of the step."""

    scalars: Any
    t: Number


_TRACING_LENGTH: Final = 1 << 20
"""Long enough for Inductor to decide that the loop is worth two threads."""

_OPTIONS: Final = {
    "config_patches": {
        # Multiply-adds may be contracted. Without it a step takes a fifth longer.
        "cpp.enable_floating_point_contract_flag": "fast",
    }
}


def flatten(scalars: Any) -> tuple[list[float], tuple[Any, ...]]:
    """The finite numbers in nested named tuples, and what is left when they are taken out.

    An infinite number stays where it is: it chooses a formula (``c = inf``), not a value in one.
    """
    numbers: list[float] = []

    def strip(x: Any) -> Any:
        if isinstance(x, tuple):
            return (type(x), *(strip(item) for item in x))
        if isinstance(x, float | int) and math.isinf(x):
            return x
        numbers.append(x)
        return None

    return numbers, strip(scalars)


def unflatten(numbers: Sequence[Any], structure: tuple[Any, ...]) -> Any:
    """Put numbers back to where :func:`flatten` took them from."""
    remaining = iter(numbers)

    def fill(x: Any) -> Any:
        if isinstance(x, tuple):
            return x[0](*(fill(item) for item in x[1:]))
        return next(remaining) if x is None else x

    return fill(structure)


def pack(call: Call, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """The numbers of a call as one small tensor, and their structure."""
    numbers, structure = flatten(call)
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in numbers]), structure
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True), structure


@cache
def kernel(
    rule: Rule,
    flags: Any,
    structure: tuple[Any, ...],
    count: int,
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Kernel:
    """A function ``kernel(*vectors, numbers)`` that runs a rule and writes its results in place.

    Args:
        rule: the rule to compile.
        flags: its flags.
        structure: of its scalars, from :func:`flatten`.
        count: how many numbers they hold.
        names: of the vectors, in the order they will be given in.
        dtypes: of the vectors.
        device: where they lie.
    """
    # Importing these takes a second, and most programs never need it.
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*arguments: Tensor) -> tuple[()]:
        *pieces, numbers = arguments
        call: Call = unflatten(numbers.unbind(), structure)
        apply(rule, eight_bit.assemble(dict(zip(names, pieces, strict=True))), call.scalars, flags, call.t)
        return ()

    example: list[Any] = [
        torch.empty(eight_bit.example(name, names, _TRACING_LENGTH), dtype=dtype, device=device)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    example.append(torch.empty(count, dtype=number_dtype(dtypes), device=device))
    expand = device.type == "cpu" and number_dtype(dtypes) == torch.float32
    with torch.no_grad(), expanded_functions(expand):
        graph = make_fx(run, tracing_mode="symbolic")(*example)
        return torch._inductor.standalone_compile(graph, example, dynamic_shapes="from_graph", options=_OPTIONS)


def number_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Scalars are float64 if anything is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
