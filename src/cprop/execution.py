"""How a rule is run: the rules say what happens to one element, this says it to tensors.

A rule is a pure function ``rule(tensors, scalars, flags) -> updated``: it takes the tensors of one
parameter by name, and returns new values for those it changes. It never writes in place, so the
same text can be run tensor by tensor, over lists of tensors, or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Job", "Rule", "run"]

Rule: TypeAlias = Callable[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]


class Job(NamedTuple):
    """One parameter's share of a step: its tensors by name, and the scalars of this step."""

    tensors: Mapping[str, Tensor]
    scalars: Any


def elements(tensor: Tensor) -> Tensor:
    """The real elements of a tensor that lie on this rank, as a view.

    A rule is element-wise, so a shard is worked on as it lies: no communication, and no need of
    torch to know how each operation of the rule is sharded. A complex number is two elements, as
    in torch's own optimizers.
    """
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.view_as_real(local) if local.is_complex() else local


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """Float32, or float64 where the tensor is: half precision is a format to store in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def run_tensor_by_tensor(rule: Rule, jobs: Iterable[Job], flags: Any) -> None:
    """Run a rule on one parameter after the other: the readable truth."""
    for job in jobs:
        stored = {name: elements(tensor) for name, tensor in job.tensors.items()}
        working = {name: tensor.to(arithmetic_dtype(tensor)) for name, tensor in stored.items()}
        for name, updated in rule(working, job.scalars, flags).items():
            stored[name].copy_(updated)


def run(rule: Rule, jobs: Iterable[Job], flags: Any) -> None:
    """Run a rule over the parameters of a group and write the results in place."""
    run_tensor_by_tensor(rule, jobs, flags)
