"""How far a command is: the interface, which does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cprop_lab.run.evaluation import Evaluation
from cprop_lab.run.specification import Specification

__all__ = ["SILENT", "Progress"]


class Progress:
    """Is notified of how far a command is, and ignores it; subclasses show it.

    A command runs one set of runs or several, each preceded by its phase.
    """

    def phase(self, title: str, later: int = 0) -> None:
        """What the next set of runs is for, and about how many iterations follow after it."""

    def begin(self, missing: Sequence[Specification], reused: int) -> None:
        """A set begins: these runs are to be run, and so many others are finished and reused."""

    def waiting(self, what: str = "") -> None:
        """What has to happen before runs can start; nothing, if they are starting."""

    def evaluated(self, specification: Specification, evaluation: Evaluation) -> None:
        """A run has been evaluated."""

    def ended(self, specification: Specification) -> None:
        """A run has ended."""

    def failed(self, specification: Specification, error: str) -> None:
        """A run has failed; it is retried if it has retries left."""

    def end(self) -> None:
        """The set is over."""


SILENT: Final = Progress()
