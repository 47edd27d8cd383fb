"""A run under way: steps, evaluations, and a state that resumes it bit for bit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn

import cprop
from cprop_lab import workloads
from cprop_lab.run import optimizers
from cprop_lab.run.evaluation import BINS, Evaluation
from cprop_lab.run.specification import Specification
from cprop_lab.workloads.task import Task

__all__ = ["Training", "arithmetic"]

DIVERGED: Final = 10.0
"""A training loss this many times the initial one, or NaN, ends a run."""


class Training:
    """A run under way: holds everything that changes from step to step, and saves it in a checkpoint.

    No random state is carried over: an epoch's order follows from the seed and the epoch, and torch's generator is
    seeded before every step from the seed and the step. So the position in the data is a number, and augmentation and
    dropout need no state.
    """

    def __init__(
        self, specification: Specification, device: torch.device | None = None, task: Task | None = None
    ) -> None:
        self.specification = specification
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if task is None:
            self.task, splits = workloads.load(specification.workload, specification.options, specification.batch_size)
        else:
            self.task, splits = task, task.data()
        self.training_data, self.test_data = splits
        seed_everything(specification.seed, -1)
        self.model = self.task.model().to(self.device)
        self.optimizer, self.scheduler = optimizers.build(specification, self.model, self.task.warmup)
        self.average = optimizers.average(specification, self.model)
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.rows: list[Evaluation] = []
        self._epoch, self._order = 0, self._order_of_epoch(0)
        self._warm = False

    # Training.

    def advance(self, iterations: int) -> None:
        """Take some steps, and time them.

        The first step of a process is not timed: it may compile.
        """
        self._train_mode(True)
        untimed = 0 if self._warm else min(1, iterations)
        for _ in range(untimed):
            self._one_step()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(iterations - untimed):
            self._one_step()
        self._warm = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += time.process_time() - cpu

    def _one_step(self) -> None:
        epoch, position = divmod(self.step, len(self._order))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of_epoch(epoch)
        seed_everything(self.specification.seed, self.step)
        batch = self.task.take(self.training_data, self._order[position])
        batch = self.task.prepare(to(self.device, batch), training=True)
        self.task.before_forward(self.model, position)
        with self._precision():
            loss = self.task.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.task.before_step(self.model)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step += 1

    def _order_of_epoch(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix(self.specification.seed, epoch, stream=1))
        return self.task.order(self.task.size(self.training_data), generator)

    def _precision(self) -> torch.autocast:
        mixed = self.specification.precision == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed)

    def _train_mode(self, training: bool) -> None:
        self.model.train(training)
        # Schedule-Free optimizers train and evaluate different weights.
        switch = getattr(self.optimizer, "train" if training else "eval", None)
        if callable(switch):
            switch()

    # Evaluating.

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Losses on fixed subsets, and CProp's scales: one row of the curves."""
        seed_everything(self.specification.seed, -2)
        self._train_mode(False)
        model = self.model if self.average is None else self.average.module.eval()
        train, test = (self._means(model, data) for data in (self.training_data, self.test_data))
        row: Evaluation = {
            "step": self.step,
            "seconds": self.seconds,
            "train_loss": train["loss"],
            "test_loss": test["loss"],
            "accuracy": test.get("accuracy"),
            "perplexity": math.exp(min(test["loss"], 700.0)) if self.task.metric == "perplexity" else None,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            **self._scales(),
        }
        self.rows.append(row)
        return row

    def _means(self, model: nn.Module, data: Any) -> dict[str, float]:
        size = self.task.evaluation_batch_size()
        chosen = fixed_subset(self.task.size(data), self.specification.examples, sequential=size == 1)
        sums: dict[str, Tensor] = {}
        count = 0
        with self.task.evaluating(model), self._precision():
            for indices in chosen.split(size):
                batch = self.task.prepare(to(self.device, self.task.take(data, indices)), training=False)
                weight = examples_in(batch)
                for name, mean in self.task.evaluate(model, batch).items():
                    sums[name] = sums.get(name, torch.zeros((), device=self.device)) + mean.float() * weight
                count += weight
        return {name: total.item() / count for name, total in sums.items()}

    def _scales(self) -> Evaluation:
        if not isinstance(self.optimizer, cprop.ConformityOptimizer):
            return {}
        # Counted with bincount and not histc: equal bins that no rounding moves between machines.
        counts, total, number = torch.zeros(BINS, dtype=torch.long), 0.0, 0
        for _, scale in self.optimizer.scales():
            counts += (scale.flatten() * BINS).long().clamp_(0, BINS - 1).bincount(minlength=BINS).cpu()
            total += scale.sum(dtype=torch.float64).item()
            number += scale.numel()
        if number == 0:
            return {}
        return {"mean_scale": total / number, "scale_histogram": (counts / number).tolist()}

    @property
    def diverged(self) -> bool:
        """Whether the training loss is NaN or has grown tenfold."""
        first, last = self.rows[0]["train_loss"], self.rows[-1]["train_loss"]
        return not last <= DIVERGED * max(first, 1e-3)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes from step to step."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "rows": deepcopy(self.rows),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a run of the same specification was."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step, self.seconds, self.rows = state["step"], state["seconds"], state["rows"]
        self.cpu_seconds = state.get("cpu_seconds", self.seconds)  # earlier versions did not keep it


@contextmanager
def arithmetic() -> Iterator[None]:
    """Deterministic and fast arithmetic.

    Sums do not depend on the order of threads. Denormal numbers are flushed to zero: on Fashion-MNIST, whose margins
    are black, many averages of gradients decay through them, and processors take several times as long for them.
    """
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # By default this also fills all allocated memory, to find reads of uninitialised memory; that only costs time here.
    memory.fill_uninitialized_memory = False
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def mix(seed: int, step: int, stream: int = 0) -> int:
    """A seed for one step of a run: neighbouring steps must not have similar random numbers (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1  # torch takes 63 bits


def seed_everything(seed: int, step: int) -> None:
    """Set torch's and Python's generators for a step.

    Without ``torch.manual_seed``, which takes half a millisecond where there is no GPU (a sixth of a small network's
    step): it notes where it was called, in case CUDA is initialised later.
    """
    value = mix(seed, step)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)


def fixed_subset(size: int, examples: int, sequential: bool) -> Tensor:
    """Which examples are evaluated: the same for every run; for a text, its first windows in order."""
    if examples >= size or sequential:
        return torch.arange(min(size, examples))
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:examples].sort().values


def examples_in(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def to(device: torch.device, batch: Any) -> Any:
    """A batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to(device, value) for key, value in batch.items()}
    return tuple(to(device, value) for value in batch) if isinstance(batch, (tuple, list)) else batch


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The data in a scheduler's state, without its methods, which are created again."""
    return {key: value for key, value in state.items() if not callable(value)}
