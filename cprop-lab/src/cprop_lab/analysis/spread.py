"""Means over seeds: how far they spread, how certain they are, and how many digits they deserve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean
from typing import Final, NamedTuple

from scipy.special import stdtrit

__all__ = ["NOTHING", "Ratio", "Spread", "as_measured", "ratio", "shown", "spread"]


class Spread(NamedTuple):
    """A mean over seeds, one standard deviation, and the half-width of a 95 % interval of the mean (Student's t)."""

    mean: float
    deviation: float
    margin: float

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + (f" ± {self.deviation:.2g}" if math.isfinite(self.deviation) else "")


NOTHING: Final = "-"
"""Stands in tables where there is no number."""
HUGE: Final = 1e7
"""From here on, a mean is written with a power of ten."""


@cache
def _t(values: int) -> float:
    """The 97.5 % quantile of Student's t for a mean of so many values: a curve asks for the same one at every step."""
    return float(stdtrit(values - 1, 0.975))  # scipy.stats.t.ppf, of which the import alone takes seconds


def spread(values: Sequence[float]) -> Spread:
    """The mean of some values, and how certain it is.

    Example:
        >>> str(spread([1.0, 2.0, 3.0]))
        '2 ± 1'
        >>> spread([1.0]).margin
        inf
    """
    if len(values) < 2:
        return Spread(fmean(values), math.nan, math.inf)
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return Spread(mean, deviation, _t(len(values)) * deviation / math.sqrt(len(values)))


class Ratio(NamedTuple):
    """A ratio averaged over seeds, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def ratio(values: Sequence[float]) -> Ratio:
    """The geometric mean of some ratios, and its 95 % interval, which is symmetric on a log scale.

    On a linear scale, the interval of a ratio may reach below zero: it would claim savings of more than everything.

    Example:
        >>> [round(value, 2) for value in ratio([0.5, 0.5, 0.6])]
        [0.53, 0.41, 0.69]
    """
    mean, _, margin = spread([math.log(value) for value in values])
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))


def shown(values: Iterable[float], unit: str = "", nothing: str = NOTHING, digits: int | None = None) -> str:
    """Mean and one standard deviation of the finite values.

    Args:
        values: one per seed.
        unit: put after them.
        nothing: said if no value is finite.
        digits: significant digits of the mean; by default as many as the deviation leaves.

    Example:
        >>> shown([2934, 2951]), shown([2934, 2951], digits=3)
        ('2,942 ± 12', '2,940 ± 10')
        >>> shown([1e9, 5e9])  # the perplexity of a run that fell apart
        '3.0e+09 ± 2.8e+09'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return nothing
    mean, deviation, _ = spread(values)
    parts = [mean, deviation] if deviation > 0 else [mean]
    if digits is not None:
        places = _places(mean, digits)
        return " ± ".join(f"{round(part, places):,.{max(0, places)}f}" for part in parts) + unit
    if abs(mean) >= HUGE:
        return " ± ".join(f"{part:.1e}" for part in parts) + unit
    if not deviation > 0:  # one seed, or all seeds alike
        text = f"{mean:,.{_decimals(mean, 4)}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + unit
    decimals = min(_decimals(deviation, 2), _decimals(mean, 6))
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}{unit}"


def _places(value: float, digits: int) -> int:
    """Where to round a value to keep so many digits of it; negative left of the decimal point."""
    return digits - 1 - math.floor(math.log10(abs(value))) if value else 0


def _decimals(value: float, digits: int) -> int:
    """How many decimals show so many digits of a value."""
    return max(0, _places(value, digits))


def as_measured(values: Iterable[float], column: str, nothing: str = NOTHING, digits: int | None = None) -> str:
    """Values of a curve, over seeds, in the unit that people know them by."""
    times, unit = (100, " %") if column == "accuracy" else (1, "")
    return shown((times * value for value in values), unit, nothing, digits)
