"""Tables of names: the laboratory's own, and what modules of your own add to them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, Generic, TypeVar

from cprop_lab import source

__all__ = ["Registry", "adding", "lazy", "load"]

T = TypeVar("T")

NAME: Final = r"[a-z][a-z0-9_-]*"

_adding: Final[dict[str, None]] = {}


class Registry(Mapping[str, T], Generic[T]):
    """A table from names to what they stand for.

    Args:
        kind: what it has, for errors.
        own: the laboratory's own entries, whose version in a run's id is that of the laboratory.

    Example:
        >>> colours = Registry("colour", {"red": 0xFF0000})
        >>> colours.add("blue", 0x0000FF, version="1")
        >>> list(colours), colours.code("red"), colours.code("blue")
        (['red', 'blue'], '', '1')
        >>> colours.add("red", 0xEE0000)
        Traceback (most recent call last):
        ...
        ValueError: there is a colour 'red' already: choose another name
    """

    def __init__(self, kind: str, own: Mapping[str, T]) -> None:
        self.kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self.own = own
        self._added: dict[str, T] = {}
        self._codes: dict[str, Callable[[], str]] = {}

    def __getitem__(self, name: str) -> T:
        return self.own[name] if name in self.own else self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._added))

    def __len__(self) -> int:
        return len(self.own) + len(self._added)

    def add(self, name: str, entry: T, version: str | None = None, above: int = 1) -> None:
        """Add an entry of the calling module's.

        Args:
            name: lower-case letters, digits, hyphens and underscores.
            entry: what it stands for.
            version: what identifies it in a run's id; by default a digest of its module's source, and of all modules of
                your own that this imports.
            above: how many calls above this one the module's is.

        Raises:
            ValueError: if the name is taken or malformed, or the source cannot be read.
        """
        module: str = sys._getframe(above).f_globals["__name__"]
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"{name!r} cannot be the name of {self.kind}: use lower-case letters, digits, hyphens and underscores"
            )
        if name in self:
            raise ValueError(f"there is {self.kind} {name!r} already: choose another name")
        if version is None and not source.read(module):
            raise ValueError(
                f"{name!r}, {self.kind}, has no source that could be hashed: register it in a .py file that is imported"
            )
        self._added[name] = entry
        self._codes[name] = (lambda: source.digest(module)) if version is None else (lambda: version)
        _adding[module] = None

    def code(self, name: str) -> str:
        """What identifies an entry in a run's id; empty for the laboratory's own."""
        return self._codes[name]() if name in self._codes else ""


def load(modules: Iterable[str]) -> None:
    """Import modules of your own, which add to the tables as they are imported; each is imported once.

    Raises:
        ValueError: if there is no such module, or its import fails.
    """
    for module in modules:
        source.load(module)


def adding() -> list[str]:
    """The modules that have added something, which other processes must load too."""
    return list(_adding)


def lazy(module: str, name: str, **fixed: Any) -> Callable[..., Any]:
    """A class or function that is imported when it is first called.

    Args:
        module: that has it.
        name: in the module.
        fixed: arguments of every call.

    Example:
        >>> lazy("math", "sqrt")(4.0)
        2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **fixed, **kwargs)

    return call
