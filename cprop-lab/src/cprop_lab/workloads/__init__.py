"""Data, network and loss: the paper's, by name, and a user's own, as ``module:Task``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from cprop_lab import source
from cprop_lab.registry import adding, lazy

if TYPE_CHECKING:
    from cprop_lab.workloads.task import Task

__all__ = ["WORKLOADS", "build", "code", "load", "sources"]

IMAGES: Final = "cprop_lab.workloads.images"
TEXT: Final = "cprop_lab.workloads.text"

# From a name to what builds the task, given the run's options; imported when it is used.
WORKLOADS: Final[Mapping[str, Callable[..., Task]]] = {
    "fmnist-fc": lazy(IMAGES, "fashion_mnist_fc"),
    "fmnist-cnn": lazy(IMAGES, "fashion_mnist_cnn"),
    "cifar100-vgg": lazy(IMAGES, "cifar100_vgg"),
    "cifar100-resnet": lazy(IMAGES, "cifar100_resnet"),
    "tiny-imagenet-vgg": lazy(IMAGES, "tiny_imagenet_vgg"),
    "tiny-imagenet-resnet": lazy(IMAGES, "tiny_imagenet_resnet"),
    "ptb-lstm": lazy(TEXT, "PennTreebank", dropout=False),
    "ptb-lstm-dropout": lazy(TEXT, "PennTreebank", dropout=True),
    "ptb-lstm-small": lazy(TEXT, "PennTreebank", embedding=100, units=200),
    "ptb-transformer": lazy(TEXT, "WordTransformers"),
    "ptb-gpt": lazy(TEXT, "CharacterGPT"),
}


def own(workload: str) -> type[Task]:
    """The class that ``module:Task`` names.

    Raises:
        ValueError: if there is none, or it is no task.
    """
    module, _, name = workload.partition(":")
    if not name:
        raise ValueError(
            f"no workload is called {workload!r}: take one of {', '.join(WORKLOADS)}, or module:Task for your own"
        )
    from cprop_lab.workloads.task import Task

    task = source.load(module, name)
    if not (inspect.isclass(task) and issubclass(task, Task)):
        raise ValueError(f"{workload!r} is no task: derive it from cprop_lab.Task")
    return task


def build(workload: str, options: Mapping[str, Any], batch_size: int = 32) -> Task:
    """The task of a run.

    Raises:
        ValueError: if there is none of that name, or it does not have such options.
    """
    make = WORKLOADS[workload] if workload in WORKLOADS else own(workload)
    try:
        task = make(**options)
    except TypeError as error:
        raise ValueError(f"{workload} does not take the options {dict(options)}: {error}") from error
    task.batch_size = batch_size
    return task


def load(workload: str, options: Mapping[str, Any], batch_size: int = 32) -> tuple[Task, tuple[Any, Any]]:
    """The task of a run, and its training and test data: read once for all runs that a process has of it.

    Each run has a copy of the task as it was once it had read its data, since a network may depend on what it found
    there, such as a vocabulary. Only the data of the latest run are kept.

    Raises:
        ValueError: as :func:`build` does.
    """
    from cprop_lab.workloads.data import ENVIRONMENT

    task, splits = _load(workload, code(workload), tuple(options.items()), batch_size, os.environ.get(ENVIRONMENT))
    return copy(task), splits


@lru_cache(maxsize=1)
def _load(
    workload: str, code: str, options: tuple[tuple[str, Any], ...], batch_size: int, folder: str | None
) -> tuple[Task, tuple[Any, Any]]:
    """Depends on all of these, the user's code and the data folder included."""
    task = build(workload, dict(options), batch_size)
    return task, task.data()


def code(workload: str) -> str:
    """A digest of a user's own task for the run id, since its code changes; empty for a built-in workload.

    Raises:
        ValueError: if there is no such task.
    """
    if workload in WORKLOADS:
        return ""
    own(workload)
    return source.digest(workload.partition(":")[0])


def sources(workloads: Iterable[str]) -> dict[str, dict[str, source.Module]]:
    """The code of users' own tasks and optimizers, for :func:`source.adopt` in another process."""
    modules = dict.fromkeys(workload.partition(":")[0] for workload in workloads if workload not in WORKLOADS)
    found = {module: source.read(module) for module in (*modules, *adding())}
    return {module: files for module, files in found.items() if files}
