"""Chooses an implementation, and prepares the rule to run as that."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from shutil import which
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from cprop.arithmetic import is_fake
from cprop.execution.for_loop import run_for_loop
from cprop.execution.foreach import run_foreach
from cprop.execution.fused import prepare_fused
from cprop.execution.job import Job, require_one_shape
from cprop.measures import is_built_in
from cprop.rules import Rule

__all__ = ["Implementation", "check_implementation", "choose_implementation", "prepare"]


logger: Final = logging.getLogger("cprop")


class Implementation(Enum):
    """The implementations of a rule. Results are the same up to rounding."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FUSED = "fused"


def choose_implementation(params: Sequence[Tensor], foreach: bool | None, fused: bool | None) -> Implementation:
    """The implementation that torch would choose for these parameters and flags."""
    check_implementation(foreach, fused)
    if fused:
        return Implementation.FUSED
    if foreach is None and fused is None:
        _, foreach = _default_to_fused_or_foreach(list(params), differentiable=False)
        if not foreach and not torch.compiler.is_compiling() and params and params[0].device.type == "cpu":
            recommend_fused()
    return Implementation.FOREACH if foreach else Implementation.FOR_LOOP


def check_implementation(foreach: bool | None, fused: bool | None) -> None:
    """Raise if two implementations are asked for."""
    if foreach and fused:
        raise RuntimeError("foreach=True and fused=True are mutually exclusive: set only one of them")


@cache
def recommend_fused() -> None:
    """Say once that there is a faster implementation, if there is."""
    if which(os.environ.get("CXX", "g++")):
        logger.info("running a CPU step as a for-loop; with fused=True it is several times faster, compiled once")


def prepare(rule: Rule, jobs: Iterable[Job], flags: Any, implementation: Implementation) -> list[Callable[[], None]]:
    """Prepare a rule for the parameters of a group, and return the functions that run it.

    Everything that can fail happens here, such as checking tensors and compiling kernels. So a step either updates
    all parameters or none.
    """
    jobs = list(jobs)
    fused = implementation is Implementation.FUSED
    if torch.compiler.is_compiling() or (fused and any(is_fake(job.rows[0][0]) for job in jobs)):
        # The caller traces the whole step, so run the rule itself.
        implementation = Implementation.FOR_LOOP
    if implementation is Implementation.FOREACH and not is_built_in(getattr(flags, "measure", flags)):
        # A list of tensors supports only what rules and built-in measures use.
        implementation = Implementation.FOR_LOOP
    runs = []
    for job in jobs:
        for row in job.rows:
            require_one_shape(job.names, row)
        runs.append(_PREPARE[implementation](rule, job, flags))
    return runs


def deferred(run: Callable[[Rule, Job, Any], None]) -> Callable[[Rule, Job, Any], Callable[[], None]]:
    """Adapt an implementation that needs no preparation."""
    return lambda rule, job, flags: partial(run, rule, job, flags)


_PREPARE: Final = {
    Implementation.FOR_LOOP: deferred(run_for_loop),
    Implementation.FOREACH: deferred(run_foreach),
    Implementation.FUSED: prepare_fused,
}
