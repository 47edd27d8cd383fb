"""Rules: what they are, how they read their inputs, and how their results are written.

A rule is a pure function ``rule(tensors, scalars, flags) -> updated``. It takes the tensors of one
parameter by name and returns new values for those it changes. It never writes in place, so the same
code runs as a for-loop over tensors, over lists of tensors (foreach), or compiled (fused).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

from torch import Tensor

from cprop.arithmetic import squarable_or_zero
from cprop.storage import Draw, is_rounded, load, random_bits, store

__all__ = ["GRAD", "MOVED", "PARAM", "Rule", "apply", "rounding_stochastically", "rounds", "with_finite_grad", "write"]

Rule: TypeAlias = Callable[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]

PARAM: Final = "param"
"""The name of the parameter itself in a rule's tensors."""
GRAD: Final = "grad"
MOVED: Final = "moved"
"""The name of a parameter that is rounded stochastically if it is in bfloat16, like state."""


def apply(rule: Rule, stored: Mapping[str, Tensor], scalars: Any, flags: Any, draw: Draw | None) -> None:
    """Run a rule on stored tensors at compute precision, and write the results back."""
    working = with_finite_grad({name: load(tensor) for name, tensor in stored.items()})
    write(stored, rule(working, scalars, flags), draw)


def rounds(names: Iterable[str], stored: Iterable[Tensor]) -> bool:
    """Whether any of these tensors is rounded stochastically, so that writing them needs a draw."""
    return any(is_rounded(x) and name not in (PARAM, GRAD) for name, x in zip(names, stored, strict=True))


def with_finite_grad(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace gradient elements that are NaN, infinite, or too large to square with zero.

    One such element would stay in a running average forever. Zeroing it is the only element-wise
    fix: skipping the whole step or the whole parameter would need a reduction, a host
    synchronization, and agreement between all ranks.

    Example:
        >>> import torch
        >>> with_finite_grad({GRAD: torch.tensor([1.0, torch.nan, -torch.inf])})
        {'grad': tensor([1., 0., 0.])}
    """
    return {**tensors, GRAD: squarable_or_zero(tensors[GRAD])} if GRAD in tensors else tensors


def write(stored: Mapping[str, Tensor], updated: Mapping[str, Tensor], draw: Draw | None) -> None:
    """Write results in place: parameters and gradients rounded as in torch, state according to its format.

    All state of an element shares its random bits: each tensor is still rounded without bias, and a hash per tensor
    would be a sixth of the step.
    """
    noise = None
    for name, value in updated.items():
        rounded = name not in (PARAM, GRAD) and is_rounded(stored[name])
        if rounded and noise is None:
            noise = random_bits(value, cast("Draw", draw))
        store(stored[name], value, noise if rounded else None)


def rounding_stochastically(rule: Rule) -> Rule:
    """The same rule, for a parameter under the name ``MOVED`` instead of ``PARAM``."""

    def rounded(x: Mapping[str, Tensor], scalars: Any, flags: Any) -> dict[str, Tensor]:
        updated = rule({**x, PARAM: x[MOVED]}, scalars, flags)
        return {MOVED if name == PARAM else name: value for name, value in updated.items()}

    return rounded
