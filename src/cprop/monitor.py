r"""What the statistics say about a training run, layer by layer and in plain words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

import torch
from torch import Tensor

from cprop.advice import advice
from cprop.execution import Way
from cprop.moments import EARLIER, STEP
from cprop.optimizers.base import ConformityOptimizer
from cprop.sharding import local
from cprop.summary import Layer, Sample, layer, over_ranks, sums, together

__all__ = ["Monitor", "Sink"]

Sink: TypeAlias = Callable[[Sample], object]
"""Told every sample as it is taken."""
logger: Final = logging.getLogger("cprop")
KEPT: Final = 500
"""Samples that a monitor keeps: with 150 layers they take about 80 MB, and a figure has no room for more."""


@dataclass(repr=False)
class Monitor:
    r"""Looks at an optimizer every so many steps, keeps what it saw, and says what it means.

    Between samples a step costs one call of a hook. A sample is one pass over the statistics and reads its numbers back
    at once; with sharded parameters they are added up over ranks, one small reduction for each way of sharding. Before
    the first gradient there is nothing to see, and no sample is taken.

    ``samples`` holds at most 500, so that a run may be as long as it likes: beyond that the later half are kept as they
    come, and those before are thinned out evenly. Sinks are told every sample: to keep them all, give a list's
    ``append``.

    With the running mean :math:`\hat m` and mean square :math:`\hat v` of an element, over weights whose squares add up
    to :math:`k`,

    .. math::
        \Sigma_B = \frac{\hat v - \hat m^2}{1 - k}, \qquad G^2 = \hat m^2 - k\,\Sigma_B, \qquad
        k = \frac{(1 - \beta)(1 + \beta^t)}{(1 + \beta)(1 - \beta^t)}

    are unbiased if the gradients of the last :math:`1 / (1 - \beta)` steps have one mean. In training it does not
    stand still: where it turns, the turn counts as noise, and where it shrinks, the estimate lags behind.

    Args:
        optimizer: any of this package.
        named_parameters: ``model.named_parameters()``, for names; parameters of one module are one layer. One that has
            no name is a layer of its own, by its number in the param groups: "parameter 0".
        every: steps between two samples.
        batch_size: examples in a step, over all ranks and accumulated gradients, for the noise scale.
        sinks: told every sample; see :mod:`cprop.integrations`.

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
                f"{type(self.optimizer).__name__} keeps no statistics to look at: give an optimizer of this package, "
                "such as cprop.CProp(optimizer)"
            )
        for name in ("every", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"invalid {name} {value}: give a whole number from 1 on")
        named = list(self.named_parameters)
        if any(isinstance(entry, Tensor) for entry in named):
            raise TypeError("Monitor wants names: give model.named_parameters(), and not model.parameters()")
        self._names = {p: layer_of(name) for name, p in named}
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
        if (self._steps + 1) % self.every == 0:  # the step counts them as zero, and the wrapper makes them zero
            parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
            self._not_finite = {p: (~torch.isfinite(local(p.grad))).sum() for p in parameters if p.grad is not None}

    def _after_step(self, *_: object) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            self._look()
        self._not_finite = {}

    def close(self) -> None:
        """Look no more; what was seen is kept."""
        for hook in self._hooks:
            hook.remove()

    def sample(self) -> Sample:
        """Look now.

        Raises:
            ValueError: if no parameter has had a gradient yet.
        """
        taken = self._look()
        if taken is None:
            raise ValueError("no parameter has had a gradient yet: take a step first")
        return taken

    @torch.no_grad()
    def _look(self) -> Sample | None:
        """A sample, unless there is nothing to see yet: within a step, that is no reason to end the training."""
        seen = [found for found in self.optimizer.moments() if found[0].numel()]  # no elements, no mean
        if not seen:
            return None
        own = [self._row(p, sums(moments, g, self.optimizer._way([p], g) is Way.FUSED)) for p, g, moments in seen]
        rows = over_ranks(own, [p for p, *_ in seen]).tolist()
        # Of all, and not of those seen: a number must not pass to another when one more has its first gradient.
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
            except Exception:  # training must not end because a logger is out of reach
                if index not in self._broken:
                    logger.warning("a sink of cprop.Monitor failed, and training goes on: %r", sink, exc_info=True)
                    self._broken.add(index)
        return taken

    def _row(self, p: Tensor, row: Tensor) -> Tensor:
        """What is added up over ranks: how many elements of the gradient were not finite, and the sums."""
        return torch.cat([self._not_finite.get(p, row.new_zeros(())).to(row).reshape(1), row])

    def advice(self) -> list[str]:
        """What the samples so far mean, in plain words; nothing if there is nothing to say."""
        return list(advice(self.samples))


def thin_out(samples: list[Sample]) -> None:
    """Drop one of the earlier half, where samples lie closest; never the first, from which the run is told.

    Done again and again, the steps between two of the earlier half differ by a factor of two at most.
    """
    earlier = range(1, len(samples) // 2)
    del samples[min(earlier, key=lambda i: samples[i + 1].step - samples[i - 1].step)]


def layer_of(name: str) -> str:
    """The module that a parameter belongs to, by its name, without what wrappers put before it.

    Example:
        >>> layer_of("module._orig_mod.encoder.fc.weight"), layer_of("scale")
        ('encoder.fc', 'scale')
    """
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts[:-1]) or name
