r"""The statistics of many parameters in a few numbers a layer, by one pass over them.

For every element CProp knows the mean and the mean square of its past gradients. That is more than a scale: it is an
estimate of the gradient's signal and of its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cprop import compiled
from cprop.arithmetic import divided
from cprop.compiled import LONG
from cprop.conformity import Corrections, Measure, Moments, overconfident, resolve_measure
from cprop.sharding import local

__all__ = ["BINS", "Layer", "Sample", "layer", "over_ranks", "sums", "together"]

BINS: Final = 20
"""Of the scale's histogram, equal parts of [0, 1]."""


class Layer(NamedTuple):
    r"""What the statistics say about a layer, or about all of them.

    Args:
        elements: how many parameters it has.
        mean_scale: the mean of their scales.
        histogram: the shares of their scales in ``BINS`` equal parts of [0, 1].
        eps_dominates: the share whose scale is held below one by :math:`\epsilon` and not by the spread of their
            gradients: it is below one, and :math:`\epsilon` is more than half of :math:`\sigma_t` and more than a tenth
            of :math:`|\hat m_t|`.
        silent: the share that has never had a gradient other than zero.
        signal: squared length of the mean gradient, :math:`|G|^2`, corrected for the noise in its estimate; it can come
            out below zero where there is nothing but noise.
        noise: trace of the covariance of a batch's gradient, :math:`\operatorname{tr} \Sigma_B`.
        signal_error: one standard error of ``signal``, if elements are independent.
        conformity: the mean of their conformities :math:`s_t`, which their mean scale would be with :math:`c = 1`. Only
            those count that CProp scales, and that had more than one gradient to agree; NaN if there are none.
    """

    elements: int
    mean_scale: float
    histogram: tuple[float, ...]
    eps_dominates: float
    silent: float
    signal: float
    noise: float
    signal_error: float
    conformity: float = math.nan

    @property
    def signal_to_noise(self) -> float:
        r"""Squared mean gradient over the variance of a batch's, :math:`|G|^2 / \operatorname{tr} \Sigma_B`."""
        return max(self.signal, 0.0) / self.noise if self.noise > 0 else math.nan

    def noise_scale(self, batch_size: int) -> float:
        r"""The gradient noise scale, of which the critical batch size is the same order (McCandlish et al., 2018).

        .. math::
            B_{\text{simple}} = \operatorname{tr} \Sigma / |G|^2 = B \operatorname{tr} \Sigma_B / |G|^2

        Infinite where no signal can be told from the noise.

        Args:
            batch_size: examples in a step, over all ranks and accumulated gradients.
        """
        ratio = self.signal_to_noise
        return batch_size / ratio if ratio > 0 else math.nan if math.isnan(ratio) else math.inf


@dataclass(frozen=True)
class Sample:
    """One look at an optimizer.

    Args:
        step: gradients seen by the parameter that has seen most.
        total: over all layers.
        layers: by name.
        batch_size: examples per step, if it was given.
        not_finite: elements of this step's gradient that were NaN or infinite, and so counted as zero.
    """

    step: int
    total: Layer
    layers: Mapping[str, Layer]
    batch_size: int | None = None
    not_finite: int = 0

    def __repr__(self) -> str:
        return (
            f"Sample(step={self.step}, mean_scale={self.total.mean_scale:.3g}, "
            f"signal_to_noise={self.total.signal_to_noise:.3g}, layers={len(self.layers)})"
        )

    def scalars(self, prefix: str = "cprop") -> dict[str, float]:
        """Single numbers by name, as loggers want them; what is not a number is left out.

        Example:
            >>> layer = Layer(2, 0.5, (0.0,) * BINS, 0.0, 0.0, signal=1.0, noise=4.0, signal_error=0.1)
            >>> Sample(7, layer, {"fc": layer}, batch_size=32).scalars()["cprop/fc/noise_scale"]
            128.0
        """
        found = {f"{prefix}/{name}": value for name, value in self._numbers(self.total).items()}
        for layer, own in self.layers.items():
            found |= {f"{prefix}/{layer}/{name}": value for name, value in self._numbers(own).items()}
        found[f"{prefix}/not_finite"] = self.not_finite
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _numbers(self, layer: Layer) -> dict[str, float]:
        names = ("mean_scale", "eps_dominates", "silent", "signal_to_noise")
        numbers = {name: float(getattr(layer, name)) for name in names}
        if self.batch_size is not None:
            numbers["noise_scale"] = layer.noise_scale(self.batch_size)
        return numbers


# One pass over a parameter's statistics.


T = TypeVar("T")


class Sums(NamedTuple, Generic[T]):
    """What is added up over the elements of a parameter (so it can be added up over ranks too): terms, or the sums."""

    scale: T
    conformity: T
    eps_dominates: T
    silent: T
    mean_squared: T
    variance: T
    variance_squared: T
    variance_times_mean_squared: T


BLOCK: Final = 1 << 20
"""Elements that are looked at at a time, so that what is computed on the way needs little memory."""
SHOWN: Final = 1 << 14
"""Elements of a parameter, evenly spread, that its histogram is made of: a share is then known to half a percent."""


def sums(moments: Moments, group: Mapping[str, Any], fused: bool) -> Tensor:
    """The sums over what this rank holds of a parameter, and its histogram, without reading them back.

    Args:
        moments: its statistics.
        group: its param group.
        fused: whether to compile, as its optimizer does.
    """
    tensors = [local(x).reshape(-1) for x in (moments.m, moments.v, moments.a) if x is not None]
    device, number = tensors[0].device, tensors[0].numel()
    precise = precision(device)
    if not number:  # a rank may hold nothing of a small parameter
        return torch.zeros(len(Sums._fields) + BINS, dtype=precise, device=device)
    numbers = compiled.in_one_tensor([group["cprop_c"], *moments.k], tensors[0].dtype, device)

    def run(function: Look, elements: Sequence[Tensor]) -> Tensor:
        if not fused:
            return function(elements, numbers, group["cprop_measure"])
        call = kernel(function, group["cprop_measure"], len(elements), number >= LONG, numbers.dtype, device)
        found: tuple[Tensor] = call(len(elements[0]), *elements, numbers)
        return found[0]

    if number <= SHOWN:
        return run(summed_and_shown, tensors).to(precise)
    blocks = zip(*(x.split(BLOCK) for x in tensors), strict=True)
    total = torch.stack([run(summed, block) for block in blocks]).to(precise).sum(0)
    stride = math.ceil(number / SHOWN)
    some = [x[::stride].contiguous() for x in tensors]
    return torch.cat([total, run(at_least, some).to(precise) * (number / len(some[0]))])


Look: TypeAlias = Callable[[Sequence[Tensor], Tensor, str | Measure], Tensor]


def kernel(
    function: Look, measure: str | Measure, tensors: int, threads: bool, dtype: torch.dtype, device: torch.device
) -> compiled.Kernel:
    """One of the functions below as a kernel, for optimizers that run fused: they have a compiler."""

    def build() -> compiled.Kernel:
        own = compiled.measure_in_kernels(measure, device, dtype)

        def run(_: int, *arguments: Tensor) -> tuple[Tensor]:
            *elements, numbers = arguments
            return (function(elements, numbers, own),)

        vectors = [compiled.vector(device, dtype) for _ in range(tensors)]
        numbers = torch.empty(1 + len(Corrections._fields), dtype=dtype, device=device)
        return compiled.traced(run, [len(vectors[0]), *vectors, numbers], threads)

    return compiled.cached(measure, (function, tensors, threads, dtype, device), build)


def of_block(tensors: Sequence[Tensor], numbers: Tensor) -> Moments:
    """The moments of some elements, whose scalars come as one tensor, after ``c``."""
    m, v, *rest = tensors
    return Moments(m, v, Corrections(*numbers[1:].unbind()), rest[0] if rest else None)


def conformity_and_scale(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> tuple[Tensor, Tensor]:
    """The conformity of some elements, and the scale that it gives."""
    # Divided first: c may be infinite here, and infinity times a numerator of zero is no number.
    conformity = divided(resolve_measure(measure)(of_block(tensors, numbers)))
    return conformity, divided(overconfident(conformity, numbers[0]))


def terms(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Sums[Tensor]:
    """What some elements add to the sums, each."""
    moments = of_block(tensors, numbers)
    k = moments.k
    # Two scalars are divided here, and not two tensors.
    m_hat, v_hat = moments.m * (1 / k.b), moments.v * (1 / k.b_v)
    mean_squared = m_hat * m_hat
    variance = torch.relu(v_hat - mean_squared)
    standard_error = torch.sqrt(variance * k.k_m)
    conformity, scale = conformity_and_scale(tensors, numbers, measure)
    # Squares of squares: in float32 they overflow from gradients of 1e9 on.
    precise = precision(moments.m.device)
    wide_variance = variance.to(precise)
    return Sums(
        scale,
        conformity,
        # Beyond ten times eps the conformity is one in any case: there is no doubt for eps to add. Nor is a scale held
        # back that overconfidence makes one below that.
        (standard_error < k.eps) & (torch.abs(m_hat) < 10 * k.eps) & (v_hat > 0) & (scale < 1),
        v_hat == 0,
        mean_squared,
        variance,
        wide_variance * wide_variance,
        wide_variance * mean_squared,
    )


def precision(device: torch.device) -> torch.dtype:
    """What sums are taken in: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def summed(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """The sums over a block of elements."""
    return torch.stack([x.sum(dtype=precision(x.device)) for x in terms(tensors, numbers, measure)])


def at_least(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """How many scales are in each part of [0, 1] or above it: comparisons and sums, for which a kernel has no words."""
    _, scale = conformity_and_scale(tensors, numbers, measure)
    return torch.stack([(scale >= edge / BINS).sum(dtype=torch.float32) for edge in range(BINS)])


def summed_and_shown(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """Both at once, for parameters so small that a call takes longer than what it does."""
    return torch.cat([summed(tensors, numbers, measure), at_least(tensors, numbers, measure)])


def over_ranks(rows: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Rows of sums, added up over the ranks that hold different parts of a parameter."""
    table = torch.stack([row.to(rows[0].device) for row in rows])
    sharded: dict[tuple[Any, int], list[int]] = {}
    for index, p in enumerate(params):
        for dim, placement in enumerate(getattr(p, "placements", ())):
            if placement.is_shard():
                sharded.setdefault((p.device_mesh, dim), []).append(index)  # type: ignore[attr-defined]
    for (mesh, dim), indices in sharded.items():
        part = table[indices]
        dist.all_reduce(part, group=mesh.get_group(dim))
        table[indices] = part
    return table


# From sums to statistics.


def layer(row: Sequence[float], group: Mapping[str, Any], t: float) -> Layer:
    """What the sums over a parameter of a group come to, after its step ``t``."""
    beta = float(group["cprop_beta"])
    of, at_least = Sums(*row[:-BINS]), [*row[-BINS:], 0.0]
    elements = at_least[0]  # every scale is at least zero
    # The squares of the running mean's weights add up to k: its variance is k times a gradient's.
    k = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
    several = t > 1 and k < 1  # one gradient has no variance, and with a beta of zero there is never more than one
    unbiased = 1 / (1 - k) if several else math.nan
    scaled = math.isfinite(group["cprop_c"])
    noise = of.variance * unbiased
    error = 2 * k**2 * of.variance_squared * unbiased**2 + 4 * k * of.variance_times_mean_squared * unbiased
    return Layer(
        elements=round(elements),
        mean_scale=of.scale / elements,
        histogram=tuple((lower - upper) / elements for lower, upper in pairwise(at_least)),
        eps_dominates=of.eps_dominates / elements,
        silent=of.silent / elements,
        signal=of.mean_squared - k * noise,
        noise=noise,
        signal_error=math.sqrt(error),
        conformity=of.conformity / elements if several and scaled else math.nan,
    )


def together(parts: Iterable[Layer]) -> Layer:
    """Several parameters as one: shares weighted by elements, signal and noise added up."""
    parts = list(parts)
    elements = sum(part.elements for part in parts)
    judged = [part for part in parts if not math.isnan(part.conformity)]

    def share(name: str) -> float:
        return float(sum(part.elements * getattr(part, name) for part in parts) / elements)

    return Layer(
        elements,
        share("mean_scale"),
        tuple(sum(p.elements * p.histogram[i] for p in parts) / elements for i in range(BINS)),
        share("eps_dominates"),
        share("silent"),
        sum(part.signal for part in parts),
        sum(part.noise for part in parts),
        math.hypot(*(part.signal_error for part in parts)),
        sum(p.elements * p.conformity for p in judged) / sum(p.elements for p in judged) if judged else math.nan,
    )
