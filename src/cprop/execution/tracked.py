"""What a measure of the user's own reads besides its argument, so that an edit of it is noticed."""

from __future__ import annotations

import dis
import enum
import functools
import sys
from collections.abc import Hashable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cprop.measures import Measure, measure_name

__all__ = ["values_read"]


def values_read(measure: Measure) -> Hashable:
    """The values that a measure reads besides its argument; if one is edited, the result differs.

    They are its closure, defaults and global variables, and the attributes that its code names, also those of functions
    and objects that it uses. Libraries are taken as constant.

    Raises:
        RuntimeError: if the measure reads an object that cannot be compared with what it was.

    Example:
        >>> slope = functools.partial(torch.clamp, max=1.0)
        >>> before = values_read(slope)
        >>> slope.keywords["max"] = 2.0
        >>> values_read(slope) == before
        False
    """
    names: frozenset[str] = frozenset({"__call__", "forward"})
    while True:
        search = Search(measure, names)
        found = search.value(measure)
        if search.names == names:
            return found
        names = frozenset(search.names)  # the code of a function found so far may read more of an object


class Same(NamedTuple):
    """A value that is compared by identity, and kept alive so that no other takes its address."""

    kept: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.kept is other.kept

    def __hash__(self) -> int:
        return id(self.kept)


LIBRARIES: Final = frozenset({"torch", "numpy", "cprop", "builtins", *sys.stdlib_module_names} - {"__main__"})
ANYTHING: Final = frozenset({"getattr", "vars", "__dict__"})
"""Names with which code reads attributes that it does not name."""


IN_C: Final = (BuiltinFunctionType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType)


def of_library(x: Any) -> bool:
    """Whether a module, class or function belongs to a library."""
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or "builtins"
    return str(name).partition(".")[0] in LIBRARIES


class Search:
    """One pass over everything that a measure can reach."""

    def __init__(self, measure: Measure, names: frozenset[str]) -> None:
        self.measure = measure
        self.known, self.names = names, set(names)
        self.seen: dict[int, int] = {}

    def value(self, x: Any) -> Hashable:
        """What is compared of an object."""
        if x is None or isinstance(x, str | bytes | int | float | complex | torch.dtype | torch.device | enum.Enum):
            return type(x), repr(x)
        if isinstance(x, Tensor):
            return Same(x), x._version
        if isinstance(x, IN_C) or (isinstance(x, type | ModuleType | FunctionType) and of_library(x)):
            return Same(x)
        if id(x) in self.seen:
            return self.seen[id(x)]
        self.seen[id(x)] = len(self.seen)
        return type(x), *self.parts(x)

    def parts(self, x: Any) -> Iterator[Hashable]:
        """What is compared of an object that consists of others."""
        if isinstance(x, FunctionType):
            self.names |= names_in(x.__code__)
            yield Same(x.__code__)
            yield self.value(x.__defaults__)
            yield self.value(x.__kwdefaults__)
            yield from (self.value(cell.cell_contents) for cell in x.__closure__ or ())
            yield from (self.value(x.__globals__.get(name)) for name in globals_in(x.__code__))
        elif isinstance(x, MethodType):
            yield from map(self.value, (x.__func__, x.__self__))
        elif isinstance(x, functools.partial):
            yield from map(self.value, (x.func, x.args, x.keywords))
        elif isinstance(x, Mapping):
            yield from map(self.value, (*x.keys(), *x.values()))
        elif isinstance(x, list | tuple):
            yield from map(self.value, x)
        elif isinstance(x, set | frozenset):
            yield from sorted(map(repr, x))
        elif isinstance(x, staticmethod | classmethod):
            yield self.value(x.__func__)
        elif isinstance(x, property):
            yield self.value(x.fget)
        elif type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
            yield repr(x.dtype), x.shape, x.tolist().__repr__() if x.dtype.hasobject else x.tobytes()
        elif hasattr(x, "__dict__") or hasattr(type(x), "__slots__"):
            yield from self.attributes(x)
        else:
            raise RuntimeError(
                f"the measure {measure_name(self.measure)} reads an object of type {type(x).__name__}, and fused=True "
                "cannot see whether it changes: read numbers, tensors and lists of them instead, or set fused=False"
            )

    def attributes(self, x: Any) -> Iterator[Hashable]:
        """The attributes of an instance, class or module that code may read, by name."""
        classes = x.__mro__ if isinstance(x, type) else type(x).__mro__
        spaces = [] if isinstance(x, type) else [getattr(x, "__dict__", {})]
        if isinstance(x, torch.nn.Module):
            spaces += [x._parameters, x._buffers, x._modules]
        spaces += [vars(cls) for cls in classes if not of_library(cls)]
        everything = self.known & ANYTHING
        for space in spaces:
            for name in sorted(space if everything else self.known & space.keys()):
                value = space[name]
                if type(value).__name__ == "member_descriptor":  # of __slots__
                    value = getattr(x, name, None)
                yield name, self.value(value)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names of attributes and globals in a function's code, with functions defined in it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def globals_in(code: CodeType) -> tuple[str, ...]:
    """The global variables that a function's code reads."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (globals_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(sorted(own.union(*inner)))
