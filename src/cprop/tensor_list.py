"""A list of tensors that a rule can use like one tensor: operations become ``torch._foreach_`` calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["TensorList"]

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
    """A list of tensors that behaves like one tensor.

    torch functions, operators and tensor methods apply to each tensor of the list. They use one ``_foreach_`` call if
    torch has one for them, and a for-loop otherwise. So a measure may use any element-wise operation.

    Example:
        >>> x = TensorList([torch.ones(2), torch.full((3,), 4.0)])
        >>> torch.sqrt(x * 4 + 0).tensors
        [tensor([2., 2.]), tensor([4., 4., 4.])]
        >>> (1 - (x > 2).float()).tensors
        [tensor([1., 1.]), tensor([0., 0., 0.])]
    """

    __array_ufunc__ = None  # so that numpy scalars on the left of an operator defer to us

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
        return one_by_one(func, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}, so a list of tensors has none either")
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(one_by_one, attribute, self)
        return one_by_one(operator.attrgetter(name), self)

    def __add__(self, other: Any) -> Any:
        return at_once_or_one_by_one(torch._foreach_add, operator.add, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return at_once_or_one_by_one(torch._foreach_mul, operator.mul, self, other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Tensor):  # _foreach_sub would synchronize to read it
            return one_by_one(operator.sub, self, other)
        return at_once_or_one_by_one(torch._foreach_sub, operator.sub, self, other)

    def __truediv__(self, other: Any) -> Any:
        return at_once_or_one_by_one(torch._foreach_div, operator.truediv, self, other)

    def __neg__(self) -> TensorList:
        return TensorList(torch._foreach_neg(self.tensors))


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: one_by_one(function, *operands)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, other: one_by_one(function, other, x)


# No rule uses these, but a user's measure may. Python looks up operators on the class, without __getattr__.
_BINARY = ("pow", "floordiv", "mod", "and", "or", "xor")
_OTHERS = ("lt", "le", "eq", "ne", "gt", "ge", "abs", "pos", "invert", "getitem", "setitem")
for _name in (*_BINARY, *_OTHERS):
    setattr(TensorList, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
for _name in ("sub", "truediv", *_BINARY):
    setattr(TensorList, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
TensorList.__bool__ = _operator(operator.truth)  # type: ignore[attr-defined]


def operand(x: Any) -> Any:
    """An argument as ``_foreach_`` functions expect it: a list's tensors, or a number unchanged."""
    return x.tensors if isinstance(x, TensorList) else x


def fit_foreach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a ``_foreach_`` function accepts these arguments: lists, and as the last one also a number."""
    *others, last = args or (None,)
    if not all(isinstance(arg, TensorList) for arg in others):
        return False
    if isinstance(last, TensorList):
        return kwargs.keys() <= _WEIGHTS
    return not kwargs and not isinstance(last, Tensor)


def at_once_or_one_by_one(foreach: Any, function: Callable[..., Any], x: TensorList, other: Any) -> Any:
    """Apply an operator: one ``_foreach_`` call, or a for-loop if the other operand is a tensor with dimensions."""
    if isinstance(other, Tensor) and other.dim():
        return one_by_one(function, x, other)
    return TensorList(foreach(x.tensors, operand(other)))


def one_by_one(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Apply a function in a for-loop over the tensors of the lists among its arguments."""
    length = len(next(lists_in((args, kwargs))).tensors)
    return gathered([function(*taken(args, i), **taken(kwargs, i)) for i in range(length)])


def lists_in(x: Any) -> Iterator[TensorList]:
    """The lists of tensors among arguments."""
    if isinstance(x, TensorList):
        yield x
    elif isinstance(x, tuple | list | dict):
        for item in x.values() if isinstance(x, dict) else x:
            yield from lists_in(item)


def taken(x: Any, i: int) -> Any:
    """Arguments, with each list replaced by its tensor at index ``i``."""
    if isinstance(x, TensorList):
        return x.tensors[i]
    if isinstance(x, dict):
        return {key: taken(item, i) for key, item in x.items()}
    return type(x)(taken(item, i) for item in x) if type(x) in (tuple, list) else x


def gathered(results: Sequence[Any]) -> Any:
    """Combine the results for each tensor: a list if they are tensors, else their common value."""
    first = results[0]
    if isinstance(first, Tensor):
        return TensorList(results)
    if isinstance(first, tuple) and any(isinstance(item, Tensor) for item in first):
        return type(first)(map(gathered, zip(*results, strict=True)))
    for result in results:
        if result != first:
            raise TypeError(
                f"with foreach a measure gets many tensors as one, and this value differs between them ({first!r}, "
                f"{result!r}): compute each element independently, or set foreach=False"
            )
    return first
