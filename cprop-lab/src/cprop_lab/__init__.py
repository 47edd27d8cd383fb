"""The laboratory: the paper's experiments, and whether CProp helps your own training.

:class:`Task` is what you write to compare optimizers on a training of your own, and :func:`register_optimizer` adds an
optimizer of your own; everything else is reached from the command line, ``cprop-lab --help``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cprop_lab.experiments import Experiment, Variant, register_experiment
    from cprop_lab.run.measures import register_measure
    from cprop_lab.run.recipes import Recipe, register_optimizer
    from cprop_lab.run.specification import Specification
    from cprop_lab.workloads.task import Task

__version__ = "0.1.0.dev0"

__all__ = [
    "Experiment",
    "Recipe",
    "Specification",
    "Task",
    "Variant",
    "register_experiment",
    "register_measure",
    "register_optimizer",
]

# Imported when asked for: a task leads to torch, and ``cprop-lab --help`` should not take seconds.
_WHERE = {
    **dict.fromkeys(("Experiment", "Variant", "register_experiment"), "experiments"),
    "register_measure": "run.measures",
    **dict.fromkeys(("Recipe", "register_optimizer"), "run.recipes"),
    "Specification": "run.specification",
    "Task": "workloads.task",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"cprop_lab.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'cprop_lab' has no attribute {name!r}")
