"""Many tensors that a rule can treat as one: every operation becomes a ``torch._foreach_`` call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""Every function that a rule uses and torch has a version for lists of."""


class TensorList:
    """A list of tensors with the arithmetic of a tensor.

    torch's functions and the operators work on it element by element of the list, by one
    ``_foreach_`` call where torch has one, and tensor by tensor where it has not.

    Example:
        >>> x = TensorList([torch.ones(2), torch.full((3,), 4.0)])
        >>> torch.sqrt(x * 4 + 0).tensors
        [tensor([2., 2.]), tensor([4., 4., 4.])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all of them have."""
        return self.tensors[0].dtype

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> TensorList:
        kwargs = kwargs or {}
        foreach = _FOREACH.get(func)
        # These take lists, and for the last argument a number; what else torch takes, they do not.
        lists = [isinstance(arg, TensorList) for arg in args]
        if foreach is not None and all(lists[:-1]) and (lists[-1] or not isinstance(args[-1], Tensor)):
            return cls(foreach(*map(operand, args), **kwargs))
        length = len(args[lists.index(True)].tensors)
        return cls(
            [
                func(*(arg.tensors[i] if isinstance(arg, TensorList) else arg for arg in args), **kwargs)
                for i in range(length)
            ]
        )

    def __add__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_add(self.tensors, operand(other)))

    __radd__ = __add__

    def __mul__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_mul(self.tensors, operand(other)))

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_sub(self.tensors, operand(other)))

    def __truediv__(self, other: Any) -> TensorList:
        return TensorList(torch._foreach_div(self.tensors, operand(other)))

    def __rtruediv__(self, other: Any) -> TensorList:
        return TensorList([other / tensor for tensor in self.tensors])

    def __neg__(self) -> TensorList:
        return TensorList(torch._foreach_neg(self.tensors))


def operand(x: Any) -> Any:
    """What a ``_foreach_`` function takes in a list's place: its tensors, or a number as it is."""
    return x.tensors if isinstance(x, TensorList) else x
