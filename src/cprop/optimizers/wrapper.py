"""CProp around any optimizer."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from cprop import checkpoint
from cprop.arithmetic import Number, divided
from cprop.conformity import Measure, needs_mean_abs
from cprop.execution import Job, Way, choose, run
from cprop.moments import (
    MEAN,
    MEAN_SQUARE,
    PREFIX,
    STEP,
    StatisticsScalars,
    observe,
    scale_from,
    statistics_scalars,
)
from cprop.optimizers.base import (
    ConformityOptimizer,
    Settings,
    count,
    count_up,
    name_measures,
    new_counter,
    new_state,
    read_state,
    settings_of,
    tensors_of,
)
from cprop.rules import GRAD, PARAM

__all__ = ["CProp"]

SNAPSHOT = "snapshot"


class WrapperFlags(NamedTuple):
    measure: str | Measure


def observe_gradient(x: Mapping[str, Tensor], h: StatisticsScalars, flags: WrapperFlags) -> dict[str, Tensor]:
    """The first half of a step, before the inner optimizer moves."""
    return observe(x[GRAD], x, h)


def rescale_update(x: Mapping[str, Tensor], h: StatisticsScalars, flags: WrapperFlags) -> dict[str, Tensor]:
    r"""The second half: of the inner optimizer's move, only the scale's share is kept.

    .. math::
        \theta_t = \theta_{t-1} + \hat s_t (\theta'_t - \theta_{t-1})

    ``lerp`` because this sum, computed as written, is not :math:`\theta'_t` at scale one.
    """
    return {PARAM: torch.lerp(x[SNAPSHOT], x[PARAM], divided(scale_from(x, h, flags.measure)))}


class CProp(ConformityOptimizer):
    r"""CProp around any optimizer: its updates, scaled where past gradients disagree (Algorithm 1).

    .. math::
        \theta_t = \theta_{t-1} + \hat s_t \cdot \hat g_t, \qquad
        \hat g_t = \text{the inner optimizer's update}

    with the scale :math:`\hat s_t \in [0, 1]` of :func:`cprop.conformity_scale`, from the raw
    gradients. The wrapper *is* a :class:`torch.optim.Optimizer`, and shares its groups and state
    with the inner one: hand the wrapper to schedulers, gradient scalers and trainers, and forget
    the inner optimizer.

    Everything the inner optimizer does to a parameter is scaled, decoupled weight decay included;
    where that matters, use :class:`CPropAdamW`. A step costs one copy of the parameters; the native
    optimizers do without.

    Args:
        optimizer: the inner optimizer, new or in mid-training.
        beta: horizon :math:`\beta` of the statistics; 0.999 looks back about 1,000 steps.
        c: overconfidence :math:`c`; infinity switches the scaling off.
        eps: :math:`\epsilon` of the standard error; absolute, so lower it (down to 0) where
            gradients are below about 1e-6.
        measure: how conformity is measured; see :func:`cprop.conformity_scale`.
        state_dtype: ``"float32"``, ``"bfloat16"``, or ``"8bit"`` (needs torchao): how the statistics are stored.
        foreach: run CProp's part over lists of tensors; by default, as the inner optimizer's group says.
        fused: run CProp's part as compiled kernels; by default, as the inner optimizer's group says.

    These stand in every param group with the prefix ``cprop_``; a group that has one already keeps
    its own.

    Example:
        >>> import torch, cprop
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = cprop.CProp(torch.optim.NAdam(model.parameters(), lr=1e-3), c=2.0)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["cprop_c"]
        2.0

    References:
        Preechakul and Kijsirikul, *CProp: Adaptive Learning Rate Scaling from Past Gradient
        Conformity*, 2019.
    """

    inner: Optimizer

    def __init__(
        self,
        optimizer: Optimizer,
        beta: float = 0.999,
        c: float = 1.0,
        eps: float = 1e-8,
        measure: str | Measure = "normal",
        *,
        state_dtype: str = "float32",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        refuse_unsuitable(optimizer)
        settings = {
            **Settings(beta, c, eps, measure, state_dtype).check()._asdict(),
            "cprop_foreach": foreach,
            "cprop_fused": fused,
        }
        for group in optimizer.param_groups:
            settings_of({**settings, **group}).check()
        for group in optimizer.param_groups:
            group.update({name: group.get(name, value) for name, value in settings.items()})
        # Optimizer.__init__ would make groups and state anew, and there must be one of each;
        # __setstate__ sets up all the rest.
        self.__setstate__({"inner": optimizer, "defaults": {**optimizer.defaults, **settings}})
        self._start_statistics()

    @classmethod
    def around(cls, optimizer_class: type[Optimizer]) -> type[CProp]:
        """CProp around a class of optimizers, as a class that is built from parameters.

        For frameworks that want a class and keyword arguments instead of an instance. CProp's
        settings are given with the prefix ``cprop_``, as they stand in the groups; all other
        arguments go to the inner optimizer. The class and its instances can be pickled.

        Example:
            >>> import torch, cprop
            >>> optimizer_class = cprop.CProp.around(torch.optim.AdamW)
            >>> optimizer = optimizer_class(torch.nn.Linear(4, 1).parameters(), lr=1e-3, cprop_c=2.0)
            >>> optimizer_class.__name__, type(optimizer.inner).__name__
            ('CPropAroundAdamW', 'AdamW')
        """
        return _around(optimizer_class)  # type: ignore[arg-type]  # a class is hashable

    @property
    def _settings(self) -> tuple[str, ...]:
        return (*Settings._fields, "cprop_foreach", "cprop_fused")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: the same list, whoever replaces it."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, with CProp's own under the prefix ``cprop_``."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "defaults": self.defaults}

    def __repr__(self) -> str:
        return f"CProp around {self.inner!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the inner optimizer; CProp's settings may be given with it."""
        own = {name: self.defaults[name] for name in self._settings}
        settings_of({**own, **param_group}).check()
        self.inner.add_param_group({**own, **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step of the inner optimizer, and scale it.

        Args:
            closure: re-evaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, if there is one.
        """
        loss = self._begin_step(closure)
        moved = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        ways = [self._way(params, group) for group, params in moved]
        observed: list[list[Job]] = []
        snapshots: list[list[Tensor]] = []
        with self._statistics() as statistics:
            for (group, params), way in zip(moved, ways, strict=True):
                jobs = self._observations(params, statistics, group)
                # Before the inner step, which may write to the gradient or drop it.
                run(observe_gradient, jobs, WrapperFlags(group["cprop_measure"]), way)
                observed.append(jobs)
                snapshots.append([p.detach().clone() for p in params])
            self.inner.step()
        for (group, params), way, jobs, before in zip(moved, ways, observed, snapshots, strict=True):
            rescaled = [
                Job({PARAM: p, SNAPSHOT: snapshot, **own_tensors(self.state[p])}, job.scalars, job.t)
                for p, snapshot, job in zip(params, before, jobs, strict=True)
            ]
            run(rescale_update, rescaled, WrapperFlags(group["cprop_measure"]), way)
        return loss

    @staticmethod
    def _way(params: list[Tensor], group: Mapping[str, Any]) -> Way:
        """The inner optimizer's way, unless the wrapper was told another."""
        foreach, fused = group["cprop_foreach"], group["cprop_fused"]
        if foreach is None and fused is None:
            foreach, fused = group.get("foreach"), group.get("fused")
        return choose(params, foreach, fused)

    def _start_statistics(self) -> None:
        """Give every parameter that the inner optimizer has state for statistics of its own.

        The inner optimizer may be in mid-training, or allocate when it is built. A checkpoint
        library that finds some state takes it to be all there is.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p) and STEP not in self.state[p]:
                    self.state[p].update(empty_statistics(p, group))

    def _observations(
        self, params: list[Tensor], statistics: Mapping[Tensor, dict[str, Any]], group: Mapping[str, Any]
    ) -> list[Job]:
        """Allocate what is missing of the parameters' statistics, count the step, and gather them."""
        for p in params:
            if STEP not in statistics[p]:
                statistics[p].update(empty_statistics(p, group))
        count_up([statistics[p][STEP] for p in params])
        needs_abs = needs_mean_abs(group["cprop_measure"])
        scalars: dict[Number, StatisticsScalars] = {}
        jobs = []
        for p in params:
            own = statistics[p]
            if needs_abs:
                self._ensure_mean_abs(p, own, group)
            # Parameters mostly march in step: one set of scalars serves them all, and tells the
            # ways of running that they can be run together.
            t = count(own[STEP], group)
            if t not in scalars:
                scalars[t] = statistics_scalars(group, t)
            jobs.append(Job({GRAD: cast("Tensor", p.grad), **own_tensors(own)}, scalars[t], t))
        return jobs

    @contextmanager
    def _statistics(self) -> Iterator[Mapping[Tensor, dict[str, Any]]]:
        """The statistics of every parameter, out of the inner optimizer's sight while this lasts.

        Many optimizers initialise a parameter when ``len(state) == 0``, and would not if ours lay
        there already.
        """
        own: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                own[p] = {key: state.pop(key) for key in list(state) if key.startswith(PREFIX)}
        try:
            yield own
        finally:
            for p, entries in own.items():
                if entries:
                    self.state[p].update(entries)

    def state_dict(self) -> dict[str, Any]:
        """One ordinary ``state_dict`` for both optimizers, loadable with ``weights_only=True``."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = name_measures(self.inner.state_dict())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        own: dict[Tensor, dict[str, Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                entries = {key: value for key, value in saved.get(p, {}).items() if key.startswith(PREFIX)}
                checkpoint.all_or_none(entries, (STEP, MEAN, MEAN_SQUARE))
                own[p] = {key: read_state(key, value, p, group) for key, value in entries.items()}
        inner_state = {
            i: {key: value for key, value in entries.items() if not str(key).startswith(PREFIX)}
            for i, entries in state_dict["state"].items()
        }
        self.inner.load_state_dict({**state_dict, "state": inner_state})
        for p, statistics in own.items():
            if statistics:
                self.state[p].update(statistics)
        self._start_statistics()


def empty_statistics(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Statistics that have not seen a gradient."""
    return {STEP: new_counter(p, group)} | {key: new_state(p, group, key) for key in (MEAN, MEAN_SQUARE)}


def own_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """CProp's part of a parameter's state, without the counter."""
    return {key: value for key, value in tensors_of(state).items() if key.startswith(PREFIX)}


def refuse_unsuitable(optimizer: Optimizer) -> None:
    """Refuse what cannot be wrapped, and say what to do instead."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"CProp wraps an optimizer, and got {type(optimizer).__name__}: "
            "write CProp(torch.optim.Adam(model.parameters(), lr=1e-3)), or use CProp.around(torch.optim.Adam) "
            "where a class is wanted"
        )
    if isinstance(optimizer, ConformityOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is scaled by CProp already: wrap the plain optimizer, or use it as it is"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates its closure many times in a step, so there is no one gradient "
            "whose conformity could be measured: use an optimizer that takes one gradient a step"
        )


class _Around(type):
    """The type of the classes that :meth:`CProp.around` makes, so that pickle can remake them."""

    optimizer_class: type[Optimizer]


@cache
def _around(optimizer_class: type[Optimizer]) -> type[CProp]:
    def __init__(  # noqa: N807
        self: CProp,
        params: ParamsT,
        *args: Any,
        cprop_beta: float = 0.999,
        cprop_c: float = 1.0,
        cprop_eps: float = 1e-8,
        cprop_measure: str | Measure = "normal",
        cprop_state_dtype: str = "float32",
        cprop_foreach: bool | None = None,
        cprop_fused: bool | None = None,
        **kwargs: Any,
    ) -> None:
        inner = optimizer_class(params, *args, **kwargs)
        CProp.__init__(
            self,
            inner,
            cprop_beta,
            cprop_c,
            cprop_eps,
            cprop_measure,
            state_dtype=cprop_state_dtype,
            foreach=cprop_foreach,
            fused=cprop_fused,
        )

    name = f"CPropAround{optimizer_class.__name__}"
    around: Any = _Around(
        name,
        (CProp,),
        {
            "__init__": __init__,
            "__module__": CProp.__module__,
            "__doc__": f"CProp around {optimizer_class.__qualname__}, built from its arguments.",
            "optimizer_class": optimizer_class,
        },
    )
    return cast("type[CProp]", around)


def _reduce_around(cls: _Around) -> tuple[Callable[..., type[CProp]], tuple[type[Optimizer]]]:
    return _around, (cls.optimizer_class,)


copyreg.pickle(_Around, _reduce_around)  # type: ignore[arg-type]
