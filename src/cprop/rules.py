"""What a rule is, what it is given to read, and how its results are written.

A rule is a pure function ``rule(tensors, scalars, flags) -> updated``: it takes the tensors of one
parameter by name, and returns new values for those it changes. It never writes in place, so the
same text can be run tensor by tensor, over lists of tensors, or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor

from cprop.arithmetic import Number, squarable_or_zero
from cprop.storage import load, store

__all__ = ["GRAD", "PARAM", "Rule", "apply", "usable", "write"]

Rule: TypeAlias = Callable[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]

PARAM: Final = "param"
"""The name under which a rule finds the parameter itself."""
GRAD: Final = "grad"


def apply(rule: Rule, stored: Mapping[str, Tensor], scalars: Any, flags: Any, t: Number) -> None:
    """Run a rule on stored tensors, in the precision that rules compute in, and write its results back."""
    working = usable({name: load(tensor) for name, tensor in stored.items()})
    for name, updated in rule(working, scalars, flags).items():
        write(name, stored[name], updated, t)


def usable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a rule reads them: gradient elements that are NaN, infinite, or too large to square count as zero.

    One such element would stay in a running average forever. Counting it as zero is the only fix
    that is element-wise: skipping the whole step, or the whole parameter, takes a reduction, a
    read-back to the host, and the agreement of all ranks.

    Example:
        >>> import torch
        >>> usable({GRAD: torch.tensor([1.0, torch.nan, -torch.inf])})
        {'grad': tensor([1., 0., 0.])}
    """
    return {**tensors, GRAD: squarable_or_zero(tensors[GRAD])} if GRAD in tensors else tensors


def write(name: str, stored: Tensor, updated: Tensor, t: Number) -> None:
    """Write a result in place: what is the user's as torch would round it, state as its format wants."""
    if name in (PARAM, GRAD):
        stored.copy_(updated)
    else:
        store(stored, updated, t)
