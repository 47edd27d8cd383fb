"""What samples of a training run mean, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cprop.summary import Sample

__all__ = ["advice"]

PATIENCE: Final = 2_000
"""Steps that something must last before it is worth a word."""
SURE: Final = 0.9
"""A mean conformity above which CProp does next to nothing. A scale is no measure of it: with c = 8 noise has 0.91."""
WORTH_A_WORD: Final = 0.1
"""A share of a layer below which nothing is said."""


def advice(samples: Sequence[Sample]) -> Iterator[str]:
    """What samples of one run mean; the last one decides, the ones before say for how long.

    Example:
        >>> from cprop.summary import Layer
        >>> half = Layer(10, 0.5, (), eps_dominates=0.4, silent=0.0, signal=1.0, noise=1.0, signal_error=0.0)
        >>> for line in advice([Sample(3000, half, {"layer4": half})]):
        ...     print(line)
        eps dominates in 40 % of layer4: lower cprop_eps, down to 0, or CProp holds the learning back there
    """
    if not samples:
        return
    last = samples[-1]
    if bad := [sample for sample in samples if sample.not_finite]:
        yield (
            f"in {len(bad)} of {len(samples)} samples some elements of the gradient were NaN or infinite, "
            f"{max(sample.not_finite for sample in bad):,} at most, and counted as zero: look for what makes them"
        )
    if (steps := lasting(samples, lambda sample: sample.total.conformity > SURE)) >= PATIENCE:
        yield (
            f"mean conformity above {SURE} for {steps:,} steps: the learning rate is probably too small to gain from "
            "CProp (paper section 4.1); try one three times as large"
        )
    for name, own in last.layers.items():
        if own.eps_dominates >= WORTH_A_WORD:
            yield (
                f"eps dominates in {100 * own.eps_dominates:.0f} % of {name}: lower cprop_eps, down to 0, or CProp "
                "holds the learning back there"
            )
        if own.silent == 1.0 and last.step >= PATIENCE:
            yield (
                f"{name} has had no gradient but zero in {last.step:,} steps: it does not learn (gradients that are "
                "NaN count as zero); freeze it, or look for what cuts it off"
            )
    # Where the loss is nearly zero, so is the noise, and the signal more so: that says nothing about batches.
    most = max((sample.total.noise for sample in samples if sample.total.noise > 0), default=0.0)
    if last.batch_size is not None and last.total.noise >= 0.01 * most:
        yield from advice_on_batches(last, last.batch_size)


def lasting(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int:
    """For how many steps up to the last sample something has held."""
    since = last = samples[-1].step if samples else 0
    for sample in reversed(samples):
        if not holds(sample):
            break
        since = sample.step
    return last - since


def advice_on_batches(sample: Sample, batch_size: int) -> Iterator[str]:
    """What the noise scale says about the batch size."""
    total = sample.total
    if not total.noise > 0:
        return
    if total.signal < 2 * total.signal_error:
        least = batch_size * total.noise / (max(total.signal, 0.0) + 2 * total.signal_error)
        yield (
            f"the gradient's mean cannot be told from its noise: the noise scale is above {least:,.0f} examples, "
            f"against batches of {batch_size:,}"
        )
    elif (scale := total.noise_scale(batch_size)) > 10 * batch_size:
        yield (
            f"the gradient noise scale is about {scale:,.0f} examples, against batches of {batch_size:,}: larger "
            "batches would take fewer steps, with the learning rate retuned (McCandlish et al., 2018)"
        )
    elif scale < 0.1 * batch_size:
        yield (
            f"the gradient noise scale is about {scale:,.0f} examples, against batches of {batch_size:,}: smaller "
            "batches would take hardly more steps, with the learning rate retuned"
        )
