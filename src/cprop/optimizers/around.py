"""Classes that wrap an optimizer class, for frameworks that build the optimizer themselves."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from cprop.measures import Measure
from cprop.optimizers.settings import BARE
from cprop.statistics import PREFIX

__all__ = ["around"]


class _Around(type):
    """Metaclass of the classes that :func:`around` returns, which makes them picklable."""

    wrapper: type[Optimizer]
    optimizer_class: type[Optimizer]


@cache
def around(wrapper: Any, optimizer_class: Any) -> Any:
    """A class derived from the wrapper that builds its inner optimizer from that one's arguments.

    Args:
        wrapper: :class:`cprop.CProp`.
        optimizer_class: the inner optimizer's class.
    """

    def __init__(  # noqa: N807
        self: Any,
        params: ParamsT,
        *args: Any,
        cprop_beta: float = 0.999,
        cprop_c: float = 1.0,
        cprop_eps: float = 0.0,
        cprop_measure: str | Measure = "normal",
        cprop_state_dtype: str = "float32",
        cprop_foreach: bool | None = None,
        cprop_fused: bool | None = None,
        **kwargs: Any,
    ) -> None:
        for name in BARE & kwargs.keys() - inspect.signature(optimizer_class).parameters:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}: write {PREFIX}{name}")
        inner = optimizer_class(params, *args, **kwargs)
        own = {"state_dtype": cprop_state_dtype, "foreach": cprop_foreach, "fused": cprop_fused}
        wrapper.__init__(self, inner, cprop_beta, cprop_c, cprop_eps, cprop_measure, **own)

    __init__.__signature__ = joint_signature(optimizer_class, __init__)  # type: ignore[attr-defined]
    members = {
        "__init__": __init__,
        "__module__": wrapper.__module__,
        "__doc__": f"{optimizer_class.__qualname__} + CProp, built from its arguments.",
        "wrapper": wrapper,
        "optimizer_class": optimizer_class,
    }
    return _Around(f"CPropAround{optimizer_class.__name__}", (wrapper,), members)


def joint_signature(optimizer_class: type[Optimizer], around: Callable[..., None]) -> inspect.Signature:
    """An optimizer's arguments and CProp's, for tools that read which arguments a class takes, such as LightningCLI."""
    inner, own = (inspect.signature(function).parameters for function in (optimizer_class.__init__, around))
    rest = [p for p in inner.values() if p.kind is p.VAR_KEYWORD]
    named = [p for p in inner.values() if p.kind is not p.VAR_KEYWORD]
    added = [p for name, p in own.items() if name.startswith(PREFIX) and name not in inner]
    return inspect.Signature([*named, *added, *rest])


def _reduce(cls: _Around) -> str | tuple[Callable[..., type], tuple[type, type]]:
    # A class derived from one of ours is an ordinary global.
    return (around, (cls.wrapper, cls.optimizer_class)) if "optimizer_class" in vars(cls) else cls.__qualname__


copyreg.pickle(_Around, _reduce)  # type: ignore[arg-type]
