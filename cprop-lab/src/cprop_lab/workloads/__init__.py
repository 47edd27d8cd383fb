"""Data, network and loss: the paper's, by name, and a user's own, as ``module:Task``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from cprop_lab.models import convolutional, fully_connected, resnet18, resnet50, vgg11, vgg16
from cprop_lab.workloads import data, source
from cprop_lab.workloads.images import Images
from cprop_lab.workloads.task import Task
from cprop_lab.workloads.text import CharacterGPT, PennTreebank, WordTransformers

__all__ = ["WORKLOADS", "Task", "build", "code", "load", "sources"]

# Of the channels: CIFAR-100's from its training images, for Tiny ImageNet the usual ones of ImageNet.
CIFAR100: Final[Mapping[str, Any]] = {
    "source": data.CIFAR100,
    "padding": 4,
    "mean": (0.50708, 0.48655, 0.44092),
    "std": (0.26733, 0.25644, 0.27615),
}
TINY_IMAGENET: Final[Mapping[str, Any]] = {
    "source": data.TINY_IMAGENET,
    "padding": 8,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}


def _fashion_cnn(dropout: float = 0.0) -> Images:
    return Images(data.FASHION_MNIST, partial(convolutional, dropout=dropout), channels=1)


# From a name to what builds the task, given the run's options.
WORKLOADS: Final[Mapping[str, Callable[..., Task]]] = {
    "fmnist-fc": lambda: Images(data.FASHION_MNIST, fully_connected, channels=1),
    "fmnist-cnn": _fashion_cnn,
    "cifar100-vgg": lambda: Images(network=vgg11, **CIFAR100),
    "cifar100-resnet": lambda: Images(network=resnet18, **CIFAR100),
    "tiny-imagenet-vgg": lambda: Images(network=vgg16, **TINY_IMAGENET),
    "tiny-imagenet-resnet": lambda: Images(network=resnet50, **TINY_IMAGENET),
    "ptb-lstm": lambda: PennTreebank(dropout=False),
    "ptb-lstm-dropout": lambda: PennTreebank(dropout=True),
    "ptb-lstm-small": lambda: PennTreebank(embedding=100, units=200),
    "ptb-transformer": WordTransformers,
    "ptb-gpt": CharacterGPT,
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
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    known = source.read(module)
    try:
        task = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{workload!r} cannot be imported from {here}: {error}") from error
    except Exception as error:
        raise ValueError(f"{workload!r} cannot be imported: {source.told(error)}") from error
    if not known:
        raise ValueError(f"{workload!r} has no source that could be hashed: put the task into a .py file")
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
    task, splits = _load(workload, code(workload), tuple(options.items()), batch_size, os.environ.get(data.ENVIRONMENT))
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
    """The code of users' own tasks, for :func:`source.adopt` in another process."""
    modules = (workload.partition(":")[0] for workload in workloads if workload not in WORKLOADS)
    return {module: source.read(module) for module in modules}
