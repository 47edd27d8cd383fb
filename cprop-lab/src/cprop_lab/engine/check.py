"""Checks a task with one step and one evaluation before anything is started, so that a mistake costs seconds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from cprop_lab import source, workloads
from cprop_lab.run.evaluation import METRICS
from cprop_lab.run.recipes import RECIPES
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training
from cprop_lab.workloads.task import Task

__all__ = ["TaskError", "check", "trimmed"]


class TaskError(ValueError):
    """A task cannot be trained as it is."""


def trimmed(specification: Specification) -> Specification:
    """What :func:`check` runs: the task of a run, with everything else as small as possible.

    Runs that only differ in their optimizer share one check, which compiles nothing; an optimizer of your own is
    checked too.
    """
    base = specification.optimizer_name.base
    optimizer = "sgd" if base in RECIPES.own else base
    return Specification(
        specification.workload,
        optimizer,
        lr=1e-9,
        batch_size=specification.batch_size,
        iterations=1,
        precision=specification.precision,
        settings={"fused": False} if optimizer == "sgd" else {},
        options=specification.options,
    )


def check(specification: Specification, device: torch.device | None = None) -> None:
    """Take one step and evaluate one batch of each split.

    Raises:
        TaskError: if a method of the task fails or returns the wrong thing; it names the method and the line.
    """
    task = workloads.build(specification.workload, specification.options, specification.batch_size)
    watched: Any = _Watched(task)
    examples = min(specification.batch_size, task.evaluation_batch_size())
    try:
        training = Training(specification.replace(examples=examples), device, watched)
        training.advance(1)
        training.evaluate()
    except TaskError:
        raise
    except Exception as error:
        own = f" with {specification.optimizer}" * (specification.optimizer != "sgd")
        raise TaskError(f"{type(task).__name__} cannot be trained{own}: {_said(error)}") from error


class _Watched:
    """A task whose methods are checked: what they raise, and what they return."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._task, name)
        if not inspect.ismethod(value):
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                result = value(*args, **kwargs)
            except Exception as error:
                raise TaskError(f"{type(self._task).__name__}.{name} fails: {_said(error)}") from error
            if name in CHECKS and (wrong := CHECKS[name](self._task, result)):
                raise TaskError(f"{_place(value)} {wrong}")
            return result

        return method


def _said(error: BaseException) -> str:
    """An error, with the line of the user's code that raised it, if there is one."""
    frames = source.own_frames(error)
    if not frames:
        return str(error)
    last = frames[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno}: {last.line})"


def _place(method: Callable[..., Any]) -> str:
    code = inspect.unwrap(method).__code__
    return f"{method.__qualname__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _data(task: Task, data: Any) -> str:
    form = "give training and test data, each a tuple of tensors or a map-style dataset"
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        many = f" of {len(data)}" if isinstance(data, (tuple, list)) else ""
        return f"returns a {type(data).__name__}{many}, not two splits: {form}"
    if all(isinstance(split, Tensor) for split in data) and len(data[0]) == len(data[1]):
        return f"returns two tensors of {len(data[0])} rows, which are examples and targets of one split: {form}"
    for split, name in zip(data, ("training", "test"), strict=True):
        if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
            return f"returns a {type(split).__name__} as {name} data, which cannot be indexed: {form}"
        if isinstance(split, (tuple, list)) and len({len(part) for part in split if isinstance(part, Tensor)}) > 1:
            return f"returns {name} data whose tensors have {', '.join(str(len(part)) for part in split)} rows"
        if len(split) == 0 or task.size(split) == 0:
            return f"returns no {name} data"
    return ""


def _model(task: Task, model: Any) -> str:
    if not isinstance(model, nn.Module):
        return f"returns a {type(model).__name__}: give a torch.nn.Module"
    return "" if any(p.requires_grad for p in model.parameters()) else "returns a network without trainable parameters"


def _loss(task: Task, loss: Any) -> str:
    if wrong := _scalar(loss):
        return f"returns {wrong}: give the mean over the batch, a scalar tensor"
    if not loss.requires_grad:
        return "returns a loss without gradient: compute it from the network's output, without detach() or item()"
    return "" if loss.isfinite() else f"returns {loss.item()} for the first batch: look at the data and the loss"


def _evaluate(task: Task, means: Any) -> str:
    needed = ["loss", *[task.metric] * (task.metric == "accuracy")]
    if task.metric not in ("", *METRICS):
        return f"cannot tell the metric {task.metric!r}: set it to one of {', '.join(METRICS)}, or leave it out"
    if not isinstance(means, dict):
        return f"returns a {type(means).__name__}: give a dictionary of {' and '.join(needed)}"
    if missing := [name for name in needed if name not in means]:
        return f"does not return {missing[0]!r}: it returns {', '.join(means) or 'nothing'}"
    for name, mean in means.items():
        if wrong := _scalar(mean):
            return f"returns {wrong} as {name!r}: give a scalar tensor"
    loss = means["loss"]
    return (
        "" if loss.isfinite() else f"returns a loss of {loss.item()} for the first batch: look at the data and the loss"
    )


def _scalar(value: Any) -> str:
    """What a value is, if it is not a tensor with one element."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


CHECKS: Final[dict[str, Callable[[Task, Any], str]]] = {
    "data": _data,
    "model": _model,
    "loss": _loss,
    "evaluate": _evaluate,
}
"""By method, what is wrong with what it returns; nothing if it can be used."""
