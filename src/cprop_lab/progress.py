"""Who is told how far the runs are."""

from __future__ import annotations

from collections.abc import Sequence

from cprop_lab.results import Row
from cprop_lab.specification import Specification

__all__ = ["Progress"]


class Progress:
    """Is told how far the runs are, and does nothing with it; others show it."""

    def begin(self, total: Sequence[Specification], done: int) -> None:
        """These runs are wanted, and so many of them are finished already."""

    def row(self, specification: Specification, row: Row) -> None:
        """A run has made a row of its curves."""

    def ended(self, specification: Specification) -> None:
        """A run has ended."""

    def failed(self, specification: Specification, error: str) -> None:
        """A run has failed, and will be tried again if it may."""

    def end(self) -> None:
        """No more runs."""
