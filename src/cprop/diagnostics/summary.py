r"""Summarizes the statistics of all parameters in a few numbers per layer, in one pass.

CProp keeps the mean and the mean square of each element's past gradients. They give not only the scale, but also an
estimate of the gradient's signal and noise.
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

from cprop.conformity import overconfident
from cprop.execution.inductor import Kernel, traced, vector
from cprop.execution.kernels import LONG, cached, in_one_tensor, measure_in_kernels
from cprop.measures import Measure, resolve_measure
from cprop.moments import Corrections, Moments

__all__ = ["BINS", "Layer", "Sample", "layer", "over_ranks", "sums", "together"]

BINS: Final = 20
"""Number of bins of the scale's histogram, of equal width in [0, 1]."""


class Layer(NamedTuple):
    r"""Summary of a layer, or of all layers.

    Args:
        elements: number of elements of its parameters.
        mean_scale: mean of the elements' scales.
        histogram: fractions of the scales in ``BINS`` bins of equal width in [0, 1].
        eps_dominates: fraction of elements that :math:`\epsilon`, and not the spread of their gradients, scales down:
            their scale is below one, and :math:`\epsilon` is more than half of :math:`\sigma_t` and more than a tenth
            of :math:`|\hat m_t|`.
        silent: fraction of elements that have only had zero gradients.
        signal: squared norm of the mean gradient, :math:`|G|^2`, corrected for the noise in its estimate; it can be
            negative if there is only noise.
        noise: trace of the covariance of a batch's gradient, :math:`\operatorname{tr} \Sigma_B`.
        signal_error: standard error of ``signal``, if elements are independent.
        conformity: mean conformity :math:`s_t`, which equals the mean scale for :math:`c = 1`. It only includes
            elements that CProp scales and that have had more than one gradient; NaN if there are none.
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
        r"""Squared mean gradient divided by the variance of a batch's, :math:`|G|^2 / \operatorname{tr} \Sigma_B`."""
        return max(self.signal, 0.0) / self.noise if self.noise > 0 else math.nan

    def noise_scale(self, batch_size: int) -> float:
        r"""The gradient noise scale, of the same order as the critical batch size (McCandlish et al., 2018).

        .. math::
            B_{\text{simple}} = \operatorname{tr} \Sigma / |G|^2 = B \operatorname{tr} \Sigma_B / |G|^2

        Infinite if the estimated signal is not positive.

        Args:
            batch_size: examples per step, over all ranks and accumulated gradients.
        """
        ratio = self.signal_to_noise
        return batch_size / ratio if ratio > 0 else math.nan if math.isnan(ratio) else math.inf


@dataclass(frozen=True)
class Sample:
    """A sample of an optimizer's statistics.

    Args:
        step: the largest number of gradients that any parameter has seen.
        total: summary of all layers.
        layers: summary of each layer, by name.
        batch_size: examples per step, if given.
        not_finite: number of NaN or infinite elements in this step's gradient, which count as zero.
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
        """Scalars by name, for loggers; non-finite values are omitted.

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
    """The terms to sum over a parameter's elements (and over ranks), or their sums."""

    scale: T
    conformity: T
    eps_dominates: T
    silent: T
    mean_squared: T
    variance: T
    variance_squared: T
    variance_times_mean_squared: T


BLOCK: Final = 1 << 20
"""Number of elements per pass, to limit the memory for temporaries."""
SHOWN: Final = 1 << 14
"""Number of evenly spaced elements in a parameter's histogram: its fractions are then accurate to half a percent."""


def sums(moments: Moments, group: Mapping[str, Any], fused: bool) -> Tensor:
    """The sums over this rank's part of a parameter, and its histogram, without host synchronization.

    Args:
        moments: its statistics.
        group: its param group.
        fused: whether to use a compiled kernel, like its optimizer.
    """
    moments = moments.local()
    tensors = [x.reshape(-1) for x in (moments.m, moments.v, moments.a) if x is not None]
    device, number = tensors[0].device, tensors[0].numel()
    precise = precision(device)
    if not number:  # a rank may have no elements of a small parameter
        return torch.zeros(len(Sums._fields) + BINS, dtype=precise, device=device)
    numbers = in_one_tensor([group["cprop_c"], *moments.k], tensors[0].dtype, device)

    def run(function: Pass, elements: Sequence[Tensor]) -> Tensor:
        if not fused:
            return function(elements, numbers, group["cprop_measure"])
        threads = torch.get_num_threads() if number >= LONG else 1
        call = get_kernel(function, group["cprop_measure"], len(elements), threads, numbers.dtype, device)
        found: tuple[Tensor] = call(len(elements[0]), *elements, numbers)
        return found[0]

    if number <= SHOWN:
        return run(summed_and_shown, tensors).to(precise)
    blocks = zip(*(x.split(BLOCK) for x in tensors), strict=True)
    total = torch.stack([run(summed, block) for block in blocks]).to(precise).sum(0)
    stride = math.ceil(number / SHOWN)
    some = [x[::stride].contiguous() for x in tensors]
    return torch.cat([total, run(at_least, some).to(precise) * (number / len(some[0]))])


Pass: TypeAlias = Callable[[Sequence[Tensor], Tensor, str | Measure], Tensor]


def get_kernel(
    function: Pass, measure: str | Measure, tensors: int, threads: int, dtype: torch.dtype, device: torch.device
) -> Kernel:
    """One of the functions below as a kernel, for fused optimizers: they have a compiler."""

    def build() -> Kernel:
        own = measure_in_kernels(measure, device, dtype)

        def run(_: int, *arguments: Tensor) -> tuple[Tensor]:
            *elements, numbers = arguments
            return (function(elements, numbers, own),)

        vectors = [vector(device, dtype) for _ in range(tensors)]
        numbers = torch.empty(1 + len(Corrections._fields), dtype=dtype, device=device)
        return traced(run, [len(vectors[0]), *vectors, numbers], threads)

    return cached(measure, (function, tensors, threads, dtype, device), build)


def of_block(tensors: Sequence[Tensor], numbers: Tensor) -> Moments:
    """The moments of a block of elements; ``numbers`` contains ``c``, followed by the corrections."""
    m, v, *rest = tensors
    return Moments(m, v, Corrections(*numbers[1:].unbind()), rest[0] if rest else None)


def conformity_and_scale(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> tuple[Tensor, Tensor]:
    """The conformity of a block of elements, and the resulting scale."""
    # Divide first: c may be infinite here, and infinity times a zero numerator is NaN.
    conformity = resolve_measure(measure)(of_block(tensors, numbers))
    return conformity, overconfident(conformity, numbers[0])


def terms(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Sums[Tensor]:
    """Each element's terms of the sums."""
    moments = of_block(tensors, numbers)
    k = moments.k
    # Divides two scalars, not two tensors.
    m_hat, v_hat = moments.m * (1 / k.b), moments.v * (1 / k.b_v)
    mean_squared = m_hat * m_hat
    variance = torch.relu(v_hat - mean_squared)
    standard_error = torch.sqrt(variance * k.k_m)
    conformity, scale = conformity_and_scale(tensors, numbers, measure)
    # Fourth powers overflow in float32 for gradients above 1e9.
    precise = precision(moments.m.device)
    wide_variance = variance.to(precise)
    return Sums(
        scale,
        conformity,
        # Above ten times eps the conformity is one anyway, so eps has no effect; nor has it if overconfidence already
        # makes the scale one.
        (standard_error < k.eps) & (torch.abs(m_hat) < 10 * k.eps) & (v_hat > 0) & (scale < 1),
        v_hat == 0,
        mean_squared,
        variance,
        wide_variance * wide_variance,
        wide_variance * mean_squared,
    )


def precision(device: torch.device) -> torch.dtype:
    """The dtype of the sums: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


def summed(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """The sums over a block of elements."""
    return torch.stack([x.sum(dtype=precision(x.device)) for x in terms(tensors, numbers, measure)])


def at_least(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """Cumulative histogram: the number of scales at or above each bin's lower edge. Kernels have no ``histc``."""
    _, scale = conformity_and_scale(tensors, numbers, measure)
    return torch.stack([(scale >= edge / BINS).sum(dtype=torch.float32) for edge in range(BINS)])


def summed_and_shown(tensors: Sequence[Tensor], numbers: Tensor, measure: str | Measure) -> Tensor:
    """Sums and histogram in one kernel launch, for small parameters, where the launch dominates."""
    return torch.cat([summed(tensors, numbers, measure), at_least(tensors, numbers, measure)])


def over_ranks(rows: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """All-reduce rows of sums over the ranks that hold different shards of a parameter."""
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
    """The summary of a parameter from its sums, after its step ``t``."""
    beta = float(group["cprop_beta"])
    of, at_least = Sums(*row[:-BINS]), [*row[-BINS:], 0.0]
    elements = at_least[0]  # every scale is at least zero
    # k is the sum of the running mean's squared weights: its variance is k times that of a gradient.
    k = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
    several = t > 1 and k < 1  # one gradient has no variance, and with beta = 0 there is never more than one
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
    """Combine several parameters: fractions are weighted by elements, signal and noise are summed."""
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
