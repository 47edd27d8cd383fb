"""What an experiment will cost: floating-point operations, counted on real steps, and the hours that follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from cprop_lab.experiments import Experiment, Preset
from cprop_lab.specification import Specification
from cprop_lab.training import Training

__all__ = ["Cost", "estimate", "flops"]


@dataclass(frozen=True)
class Cost:
    """Of an experiment.

    Args:
        runs: how many.
        iterations: of all runs together.
        flops: of all of them, evaluations included.
    """

    runs: int
    iterations: int
    flops: float

    def hours(self, flops_a_second: float, overhead: float) -> float:
        """On a device that sustains so many operations a second, with seconds of overhead an iteration besides."""
        return (self.flops / flops_a_second + self.iterations * overhead) / 3600


@cache
def flops(specification: Specification) -> tuple[float, float]:
    """Operations of one step, and of looking at one example (for a text: at one window), counted as they are done.

    An LSTM is taken apart into matrix products for this: the counter does not see inside the fused one.
    """
    training = Training(specification.but(examples=1))
    counted = []
    for do in (lambda: training.advance(1), training.evaluate):
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            do()
        counted.append(float(counter.get_total_flops()))
    step, evaluation = counted
    return step, evaluation / 2  # an example of the training data, and one of the test data


def estimate(experiment: Experiment, preset: Preset) -> Cost:
    """What an experiment costs at some length; a search for learning rates is taken to try five of them."""
    runs, iterations, total = 0, 0, 0.0
    for variant in experiment.variants:
        length = preset.lengths[variant.workload]
        selecting = experiment.kind == "learning-rates"
        number = preset.seeds * (5 if selecting else 1)
        steps = length.selection if selecting else length.iterations
        rows = 10 if selecting else length.evaluations
        # The operations are the network's: whatever the optimizer, and CProp with it, are a few an element.
        network = Specification(
            variant.workload, "sgd", lr=1e-9, batch_size=variant.batch_size, options=variant.options, iterations=1
        )
        a_step, an_example = flops(network)
        runs += number
        iterations += number * steps
        total += number * (steps * a_step + rows * 2 * examples(variant.workload, length.examples) * an_example)
    return Cost(runs, iterations, total)


def examples(workload: str, wanted: int) -> int:
    """How many examples an evaluation really looks at: Penn Treebank has 830 windows of training text."""
    return min(wanted, 830) if workload.startswith("ptb") else wanted


def total(costs: Iterable[Cost]) -> Cost:
    """All together."""
    costs = list(costs)
    return Cost(sum(c.runs for c in costs), sum(c.iterations for c in costs), sum(c.flops for c in costs))
