"""Differences between two rows, paired by seed, with intervals from resampled seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

__all__ = ["Interval", "difference"]

RESAMPLES: Final = 10_000
LEVEL: Final = 0.95


class Interval(NamedTuple):
    """A mean and its interval. Nothing is said of a sign that the interval does not have."""

    mean: float
    low: float
    high: float

    @property
    def below_zero(self) -> bool:
        """Whether all of it is below zero."""
        return self.high < 0

    @property
    def above_zero(self) -> bool:
        """Whether all of it is above zero."""
        return self.low > 0


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    r"""The mean difference of values with the same seeds, and its 95 % interval from resampled seeds.

    .. math::
        \bar d \pm \sqrt{\tfrac{n}{n - 1}} \, (q_{\pm} - \bar d)

    q are the quantiles of the resampled means. Those of few seeds are too narrow, by the factor in front.

    Args:
        ours: one value per seed; infinite if the run diverged.
        theirs: as many, with the same seeds.

    Raises:
        ValueError: if they are not paired, or fewer than two.

    Example:
        >>> found = difference([1.0, 1.1, 0.9, 1.0], [1.2, 1.3, 1.2, 1.1])
        >>> f"{found.mean:.2f} from {found.low:.2f} to {found.high:.2f}"
        '-0.20 from -0.29 to -0.11'
        >>> found.below_zero
        True
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(
            f"there are {len(ours)} values and {len(theirs)}: a comparison needs the same seeds, at least two"
        )
    pairs = list(zip(ours, theirs, strict=True))
    if not all(map(math.isfinite, (x for pair in pairs for x in pair))):
        # One that diverged is behind whatever did not; if both have, nothing is known.
        ours_lost, theirs_lost = (any(math.isinf(x) for x in values) for values in (ours, theirs))
        if ours_lost and theirs_lost:
            return Interval(math.nan, -math.inf, math.inf)
        return Interval(math.inf, math.inf, math.inf) if ours_lost else Interval(-math.inf, -math.inf, -math.inf)
    values = np.subtract(ours, theirs)
    n, mean = len(values), float(values.mean())
    drawn = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    wider = math.sqrt(n / (n - 1))
    return Interval(mean, mean + wider * (float(low) - mean), mean + wider * (float(high) - mean))
