"""The laboratory: the paper's experiments, and whether CProp helps your own training.

:class:`Task` is what you write to compare optimizers on a training of your own; everything else is
reached from the command line, ``cprop-lab --help``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cprop_lab.run.specification import Specification
    from cprop_lab.workloads.task import Task

__version__ = "0.1.0.dev0"

__all__ = ["Specification", "Task"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: a task leads to torch, and ``cprop-lab --help`` should not take seconds.
    if name == "Task":
        from cprop_lab.workloads.task import Task

        return Task
    if name == "Specification":
        from cprop_lab.run.specification import Specification

        return Specification
    raise AttributeError(f"module 'cprop_lab' has no attribute {name!r}")
