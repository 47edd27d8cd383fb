"""Advice from the samples of a training run, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cprop.diagnostics.summary import Sample

__all__ = ["advice"]

PATIENCE: Final = 2_000
"""Number of steps that a condition must last before it is reported."""
SURE: Final = 0.9
"""Mean conformity above which CProp has almost no effect. The scale cannot tell: with c = 8 pure noise has 0.91."""
LEAST_FRACTION: Final = 0.1
"""Fraction of a layer below which nothing is reported."""


def advice(samples: Sequence[Sample]) -> Iterator[str]:
    """Advice from the samples of a run: the last one decides, the earlier ones tell for how long.

    Example:
        >>> from cprop.diagnostics.summary import Layer
        >>> half = Layer(10, 0.5, (), eps_dominates=0.4, silent=0.0, signal=1.0, noise=1.0, signal_error=0.0)
        >>> for line in advice([Sample(3000, half, {"layer4": half})]):
        ...     print(line)
        eps dominates in 40 % of layer4: lower cprop_eps (down to 0), or CProp slows down learning there
    """
    if not samples:
        return
    last = samples[-1]
    if bad := [sample for sample in samples if sample.not_finite]:
        yield (
            f"{len(bad)} of {len(samples)} samples had NaN or infinite gradient elements, at most "
            f"{max(sample.not_finite for sample in bad):,}, which count as zero: find out where they come from"
        )
    if (steps := lasting(samples, lambda sample: sample.total.conformity > SURE)) >= PATIENCE:
        yield (
            f"mean conformity above {SURE} for {steps:,} steps: the learning rate is probably too small to benefit "
            "from CProp (paper section 4.1); try three times as large"
        )
    for name, own in last.layers.items():
        if own.eps_dominates >= LEAST_FRACTION:
            yield (
                f"eps dominates in {100 * own.eps_dominates:.0f} % of {name}: lower cprop_eps (down to 0), or CProp "
                "slows down learning there"
            )
        if own.silent == 1.0 and last.step >= PATIENCE:
            yield (
                f"{name} has had only zero gradients in {last.step:,} steps: it does not learn (NaN gradients count as "
                "zero); freeze it, or find out what disconnects it"
            )
    # If the loss is nearly zero, so is the noise, and the signal even more so: that says nothing about batches.
    most = max((sample.total.noise for sample in samples if sample.total.noise > 0), default=0.0)
    if last.batch_size is not None and last.total.noise >= 0.01 * most:
        yield from advice_on_batches(last, last.batch_size)


def lasting(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int:
    """Number of steps, up to the last sample, for which a condition has held."""
    since = last = samples[-1].step if samples else 0
    for sample in reversed(samples):
        if not holds(sample):
            break
        since = sample.step
    return last - since


def advice_on_batches(sample: Sample, batch_size: int) -> Iterator[str]:
    """Advice on the batch size from the noise scale."""
    total = sample.total
    if not total.noise > 0:
        return
    if total.signal < 2 * total.signal_error:
        least = batch_size * total.noise / (max(total.signal, 0.0) + 2 * total.signal_error)
        yield (
            f"the mean gradient cannot be distinguished from noise: the noise scale is above {least:,.0f} examples, "
            f"and the batch size is {batch_size:,}"
        )
    elif (scale := total.noise_scale(batch_size)) > 10 * batch_size:
        yield (
            f"the gradient noise scale is about {scale:,.0f} examples, and the batch size is {batch_size:,}: larger "
            "batches would need fewer steps, with a retuned learning rate (McCandlish et al., 2018)"
        )
    elif scale < 0.1 * batch_size:
        yield (
            f"the gradient noise scale is about {scale:,.0f} examples, and the batch size is {batch_size:,}: smaller "
            "batches would need hardly more steps, with a retuned learning rate"
        )
