"""The cost of runs: floating-point operations, counted on real steps, and the resulting hours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training

__all__ = ["Cost", "count", "estimate"]


@dataclass(frozen=True)
class Cost:
    """The cost of some runs.

    Args:
        runs: number of runs.
        iterations: of all runs together.
        flops: of all runs together, including evaluations.
        stored_bytes: of their results, as each is stored.
    """

    runs: int
    iterations: int
    flops: float
    stored_bytes: int = 0

    def hours(self, tflops: float, overhead_ms: float) -> float:
        """Hours on a device that sustains so many 10^12 operations per second, with a fixed overhead per iteration."""
        return (self.flops / tflops / 1e12 + self.iterations * overhead_ms / 1e3) / 3600

    def cells(self, tflops: float, overhead_ms: float) -> list[str]:
        """The cells of a table: runs, iterations, 10^15 operations to three digits, hours.

        Example:
            >>> Cost(30, 600_000, 1.2345e18).cells(tflops=5, overhead_ms=3)
            ['30', '600,000', '1,230', '69.1']
        """
        operations = float(f"{self.flops / 1e15:.3g}")
        return [f"{self.runs}", f"{self.iterations:,}", f"{operations:,g}", f"{self.hours(tflops, overhead_ms):,.1f}"]


class Counted(NamedTuple):
    """Operations of one step, and of evaluating one example (for a text, one window); and how many examples there are.

    Args:
        step: operations.
        example: operations.
        training: examples.
        test: examples.
    """

    step: float
    example: float
    training: int
    test: int


@cache
def count(specification: Specification) -> Counted:
    """Count the operations of a network while they run."""
    training = Training(specification.replace(examples=1))
    counted = []
    for do in (lambda: training.advance(1), training.evaluate):
        with FlopCounterMode(display=False) as counter:
            do()
        counted.append(float(counter.get_total_flops()))
    step, evaluation = counted
    sizes = (training.task.size(data) for data in (training.training_data, training.test_data))
    return Counted(step, evaluation / 2, *sizes)  # one training and one test example were evaluated


def estimate(runs: Iterable[Specification]) -> Cost:
    """The total cost of some runs."""
    runs = list(runs)
    total, stored = 0.0, 0
    for run in runs:
        # Only the network's operations count: any optimizer, CProp included, needs just a few per element.
        network = Specification(run.workload, "sgd", lr=1e-9, batch_size=run.batch_size, options=run.options)
        one, evaluations = count(network), run.iterations // run.evaluate_every
        examples = min(run.examples, one.training) + min(run.examples, one.test)
        total += run.iterations * one.step + evaluations * examples * one.example
        stored += A_RUN + AN_EVALUATION * evaluations
    return Cost(len(runs), sum(run.iterations for run in runs), total, stored)


A_RUN: Final = 4_300
AN_EVALUATION: Final = 150
"""Bytes of a stored run: its specification and the like, and a row of its curves."""
