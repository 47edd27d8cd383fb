"""What a rule is, and how it is applied to the tensors of one parameter.

A rule is a pure function ``rule(tensors, scalars, flags) -> updated``: it takes the tensors of one
parameter by name, and returns new values for those it changes. It never writes in place, so the
same text can be run tensor by tensor, over lists of tensors, or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor

from cprop.arithmetic import Number
from cprop.storage import load, store

__all__ = ["GRAD", "PARAM", "Rule", "apply", "write"]

Rule: TypeAlias = Callable[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]

PARAM: Final = "param"
"""The name under which a rule finds the parameter itself."""
GRAD: Final = "grad"


def apply(rule: Rule, stored: Mapping[str, Tensor], scalars: Any, flags: Any, t: Number) -> None:
    """Run a rule on stored tensors, in the precision that rules compute in, and write its results back."""
    working = {name: load(tensor) for name, tensor in stored.items()}
    for name, updated in rule(working, scalars, flags).items():
        write(name, stored[name], updated, t)


def write(name: str, stored: Tensor, updated: Tensor, t: Number) -> None:
    """Write a result in place: a parameter as torch would round it, state as its format wants."""
    if name == PARAM:
        stored.copy_(updated)
    else:
        store(stored, updated, t)
