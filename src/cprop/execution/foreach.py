"""Rules on lists of tensors: operations become ``torch._foreach_`` calls, where the device has kernels for lists."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from cprop.execution.for_loop import run_for_loop
from cprop.execution.job import Job, Row, as_vector, dtype_of, elements, in_one_order
from cprop.rules import Rule, with_finite_grad, write
from cprop.storage import load

__all__ = ["TensorList", "run_foreach"]


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
            alike[(row[0].device, *map(dtype_of, row))].append((row, seed))
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


_FOREACH: Final[dict[Any, Any]] = {
    torch.abs: torch._foreach_abs,
    torch.add: torch._foreach_add,
    torch.addcdiv: torch._foreach_addcdiv,
    torch.addcmul: torch._foreach_addcmul,
    torch.atan: torch._foreach_atan,
    torch.clamp_max: torch._foreach_clamp_max,
    torch.clamp_min: torch._foreach_clamp_min,
    torch.div: torch._foreach_div,
    torch.erf: torch._foreach_erf,
    torch.exp: torch._foreach_exp,
    torch.lerp: torch._foreach_lerp,
    torch.log1p: torch._foreach_log1p,
    torch.maximum: torch._foreach_maximum,
    torch.minimum: torch._foreach_minimum,
    torch.mul: torch._foreach_mul,
    torch.neg: torch._foreach_neg,
    torch.sin: torch._foreach_sin,
    torch.sqrt: torch._foreach_sqrt,
    torch.sub: torch._foreach_sub,
    torch.tanh: torch._foreach_tanh,
}
"""The functions that rules use and that have a foreach version in torch."""

_WEIGHTS: Final = frozenset({"alpha", "value"})
"""The keyword arguments that foreach versions also accept, if all other arguments are lists."""


class TensorList:
    """A list of tensors that rules and built-in measures use like one tensor.

    A torch function applies to each tensor of the list: in one ``_foreach_`` call if torch has one for it, and in a
    for-loop otherwise.

    Example:
        >>> x = TensorList([torch.ones(2), torch.full((3,), 4.0)])
        >>> torch.sqrt(x * 4 + 0).tensors
        [tensor([2., 2.]), tensor([4., 4., 4.])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.tensors[0].dtype

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        foreach = _FOREACH.get(func)
        if foreach is not None and fit_foreach(args, kwargs):
            return cls(foreach(*map(operand, args), **kwargs))
        return for_each(func, *args, **kwargs)

    def __add__(self, other: Any) -> TensorList:
        if isinstance(other, Tensor):  # _foreach_add would synchronize to read it
            return for_each(operator.add, self, other)
        return TensorList(torch._foreach_add(self.tensors, operand(other)))

    __radd__ = __add__

    def __mul__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_mul(self.tensors, operand(other)))

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> TensorList:
        if isinstance(other, Tensor):  # as for a sum
            return for_each(operator.sub, self, other)
        return TensorList(torch._foreach_sub(self.tensors, operand(other)))

    def __rsub__(self, other: Any) -> TensorList:
        return for_each(operator.sub, other, self)

    def __truediv__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_div(self.tensors, operand(other)))

    def __rtruediv__(self, other: Any) -> TensorList:
        return for_each(operator.truediv, other, self)

    def __neg__(self) -> TensorList:
        return TensorList(torch._foreach_neg(self.tensors))


def operand(x: Any) -> Any:
    """An argument as ``_foreach_`` functions expect it: a list's tensors, or a number unchanged."""
    return x.tensors if isinstance(x, TensorList) else x


def fit_foreach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a ``_foreach_`` function accepts these arguments: lists, and as the last one also a number."""
    *others, last = args
    if not all(isinstance(arg, TensorList) for arg in others):
        return False
    if isinstance(last, TensorList):
        return kwargs.keys() <= _WEIGHTS
    return not kwargs and not isinstance(last, Tensor)


def for_each(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> TensorList:
    """Apply a function in a for-loop over the tensors of the lists among its arguments."""
    length = next(len(arg.tensors) for arg in args if isinstance(arg, TensorList))
    columns = (arg.tensors if isinstance(arg, TensorList) else [arg] * length for arg in args)
    return TensorList([function(*row, **kwargs) for row in zip(*columns, strict=True)])
