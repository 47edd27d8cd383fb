r"""Monitors a training run: the statistics per layer, and advice in plain words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cprop.diagnostics.advice import advice
from cprop.diagnostics.summary import Layer, Sample, layer, over_ranks, sums, together
from cprop.execution import Implementation
from cprop.optimizers.base import ConformityOptimizer
from cprop.sharding import local
from cprop.statistics import EARLIER, STEP

__all__ = ["Monitor", "Sink"]

Sink: TypeAlias = Callable[[Sample], object]
"""Called with every sample."""
logger: Final = logging.getLogger("cprop")
KEPT: Final = 500
"""Maximum number of samples kept: with 150 layers they take about 80 MB, and a figure cannot show more."""


@dataclass(repr=False)
class Monitor:
    r"""Samples an optimizer's statistics every few steps, keeps the samples, and gives advice.

    Between samples a step costs one hook call. A sample takes one pass over the statistics and one host
    synchronization. With sharded parameters, it also takes one small all-reduce per sharding layout. No sample is taken
    before the first gradient.

    ``samples`` holds at most 500, for runs of any length. Beyond that, the later half is kept in full and the
    earlier half is thinned out evenly. Sinks receive every sample; to keep them all, pass the ``append`` method of a
    list.

    Let :math:`\hat m` and :math:`\hat v` be an element's running mean and mean square, and :math:`k` the sum of their
    squared weights. Then

    .. math::
        \Sigma_B = \frac{\hat v - \hat m^2}{1 - k}, \qquad G^2 = \hat m^2 - k\,\Sigma_B, \qquad
        k = \frac{(1 - \beta)(1 + \beta^t)}{(1 + \beta)(1 - \beta^t)}

    are unbiased if the gradients of the last :math:`1 / (1 - \beta)` steps have the same mean. In training the mean
    changes: a change of direction counts as noise, and if the mean shrinks, the estimate lags behind.

    Args:
        optimizer: any optimizer of this package.
        named_parameters: ``model.named_parameters()``, for the names; the parameters of a module form one layer. An
            unnamed parameter is its own layer, named by its index in the param groups: "parameter 0".
        every: steps between samples.
        batch_size: examples per step, over all ranks and accumulated gradients, for the noise scale.
        sinks: called with every sample; see :mod:`cprop.integrations`.

    Example:
        >>> import cprop
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = cprop.CPropSGD(model.parameters(), lr=0.01)
        >>> monitor = cprop.Monitor(optimizer, model.named_parameters(), every=10)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 3)).sum().backward()   # the same gradient every time
        ...     optimizer.step()
        >>> [sample.step for sample in monitor.samples], round(monitor.samples[-1].total.mean_scale, 3)
        ([10, 20], 1.0)

    References:
        McCandlish et al., *An Empirical Model of Large-Batch Training*, 2018, section 2.2 and appendix A.1.
    """

    optimizer: ConformityOptimizer
    named_parameters: Iterable[tuple[str, Tensor]] = ()
    every: int = 100
    batch_size: int | None = None
    sinks: Sequence[Sink] = ()
    samples: list[Sample] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, ConformityOptimizer):
            raise TypeError(
                f"{type(self.optimizer).__name__} has no CProp statistics to monitor: pass an optimizer of this "
                "package, such as cprop.CProp(optimizer)"
            )
        for name in ("every", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"invalid {name} {value}: it must be an integer of at least 1")
        named = list(self.named_parameters)
        if any(isinstance(entry, Tensor) for entry in named):
            raise TypeError("Monitor needs names: pass model.named_parameters() instead of model.parameters()")
        self._names = WeakIdKeyDictionary({p: layer_of(name) for name, p in named})
        self._steps = 0
        self._broken: set[int] = set()
        self._not_finite: dict[Tensor, Tensor] = {}
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )

    def __repr__(self) -> str:
        seen = f"last {self.samples[-1]!r}" if self.samples else "no samples yet"
        return f"Monitor({type(self.optimizer).__name__}, every={self.every}, {seen})"

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        if (self._steps + 1) % self.every == 0:  # count them before the step, which may set them to zero
            parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
            self._not_finite = {p: (~torch.isfinite(local(p.grad))).sum() for p in parameters if p.grad is not None}

    def _after_step(self, *_: object) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            self._look()
        self._not_finite = {}

    def close(self) -> None:
        """Stop monitoring; the samples are kept."""
        for hook in self._hooks:
            hook.remove()

    def sample(self) -> Sample:
        """Take a sample now.

        Raises:
            ValueError: if no parameter has had a gradient yet.
        """
        taken = self._look()
        if taken is None:
            raise ValueError("no parameter has had a gradient yet: take a step first")
        return taken

    @torch.no_grad()
    def _look(self) -> Sample | None:
        """Take a sample, or return ``None`` before the first gradient: a hook must not stop the training."""
        seen = [found for found in self.optimizer.moments() if found[0].numel()]  # an empty parameter has no mean
        if not seen:
            return None
        own = [
            self._row(p, sums(moments, g, self.optimizer._implementation([p], g) is Implementation.FUSED))
            for p, g, moments in seen
        ]
        rows = over_ranks(own, [p for p, *_ in seen]).tolist()
        # Number all parameters, not only those seen, so that numbers do not change when one has its first gradient.
        numbers = {p: number for number, p in enumerate(chain(*(g["params"] for g in self.optimizer.param_groups)))}
        by_layer: dict[str, list[Layer]] = {}
        for (p, group, _), (_, *row) in zip(seen, rows, strict=True):
            name = self._names.get(p, f"parameter {numbers[p]}")
            t = float(self.optimizer.state[p][STEP])
            by_layer.setdefault(name, []).append(layer(row, group, t))
        layers = {name: together(parts) for name, parts in by_layer.items()}
        states = (self.optimizer.state[p] for p, *_ in seen)
        step = max(round(float(state[STEP]) + float(state.get(EARLIER, 0.0))) for state in states)
        not_finite = round(sum(row[0] for row in rows))
        taken = Sample(step, together(chain(*by_layer.values())), layers, self.batch_size, not_finite)
        self.samples.append(taken)
        if len(self.samples) > KEPT:
            thin_out(self.samples)
        for index, sink in enumerate(self.sinks):
            try:
                sink(taken)
            except Exception:  # a failing logger must not stop the training
                if index not in self._broken:
                    logger.warning("a sink of cprop.Monitor failed; training continues: %r", sink, exc_info=True)
                    self._broken.add(index)
        return taken

    def _row(self, p: Tensor, row: Tensor) -> Tensor:
        """The values to sum over ranks: the number of non-finite gradient elements, and the sums."""
        return torch.cat([self._not_finite.get(p, row.new_zeros(())).to(row).reshape(1), row])

    def advice(self) -> list[str]:
        """Advice based on the samples so far, in plain words; empty if there is none."""
        return list(advice(self.samples))


def thin_out(samples: list[Sample]) -> None:
    """Drop one sample of the earlier half, where they are closest together; never the first one.

    Repeated, this keeps the gaps in the earlier half within a factor of two.
    """
    earlier = range(1, len(samples) // 2)
    del samples[min(earlier, key=lambda i: samples[i + 1].step - samples[i - 1].step)]


def layer_of(name: str) -> str:
    """The name of a parameter's module, without the prefixes that wrappers add.

    Example:
        >>> layer_of("module._orig_mod.encoder.fc.weight"), layer_of("scale")
        ('encoder.fc', 'scale')
    """
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts[:-1]) or name
