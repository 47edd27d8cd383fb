"""The wrapper: any optimizer + CProp."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from cprop import checkpoint
from cprop.execution import Implementation, Job, choose_implementation, prepare, run_all
from cprop.measures import Measure
from cprop.optimizers.base import ConformityOptimizer
from cprop.optimizers.settings import ROUNDING, Settings, settings_of
from cprop.optimizers.state import count_up, name_measures, read_state
from cprop.optimizers.suitable import refuse_unsuitable, warn_of_weights_in_state
from cprop.rules import GRAD, MOVED
from cprop.statistics import (
    MEAN,
    MEAN_SQUARE,
    PREFIX,
    STEP,
    StatisticsScalars,
    scale_from,
    update_statistics,
)

__all__ = ["CProp"]

SNAPSHOT: Final = "snapshot"
"""The parameter before the inner optimizer's step."""

TORCHS_SETTINGS: Final = frozenset(
    {
        *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad"),
        *("maximize", "foreach", "fused", "capturable", "differentiable"),
    }
)
"""Settings with the same meaning in every optimizer that has them: numbers, pairs of numbers, and flags."""


class WrapperFlags(NamedTuple):
    measure: str | Measure


def observe_gradient(x: Mapping[str, Tensor], h: StatisticsScalars, flags: WrapperFlags) -> dict[str, Tensor]:
    """The first half of a step, before the inner optimizer's.

    The gradient is written back, so that its non-finite elements are zero for the inner optimizer too.
    """
    return {GRAD: x[GRAD], **update_statistics(x[GRAD], x, h)}


def rescale_update(x: Mapping[str, Tensor], h: StatisticsScalars, flags: WrapperFlags) -> dict[str, Tensor]:
    r"""The second half of a step: scale the inner optimizer's update.

    .. math::
        \theta_t = \theta_{t-1} + \hat s_t (\theta'_t - \theta_{t-1})

    ``lerp`` is exact at scale one; the sum as written is not. A bfloat16 parameter is rounded stochastically: rounding
    to nearest would turn half of a one-unit update into all or nothing.
    """
    return {MOVED: torch.lerp(x[SNAPSHOT], x[MOVED], scale_from(x, h, flags.measure))}


class CProp(ConformityOptimizer):
    r"""Wraps any optimizer, and scales its updates down where past gradients disagree (Algorithm 1).

    .. math::
        \theta_t = \theta_{t-1} + \hat s_t \cdot \hat g_t, \qquad
        \hat g_t = \text{the inner optimizer's update}

    with the scale :math:`\hat s_t \in [0, 1]` of :func:`cprop.conformity_scale`, computed from the raw
    gradients. The wrapper is itself a :class:`torch.optim.Optimizer`, and shares its groups and state
    with the inner one. Pass the wrapper, not the inner optimizer, to schedulers, gradient scalers and
    trainers.

    The inner optimizer must keep its weights only in the parameters. Copies in its state, such as
    Lookahead's slow weights or master weights, are not scaled. If this can be detected, as for
    Schedule-Free, the constructor raises an error.

    All changes by the inner optimizer are scaled, including decoupled weight decay; use
    :class:`CPropAdamW` to leave it unscaled. A step copies the parameters once, which the native
    optimizers avoid. NaN and infinite gradient elements count as zero, and are set to zero in
    ``p.grad``, which keeps them out of the inner optimizer's state as well.

    Args:
        optimizer: the inner optimizer, new or in mid-training.
        beta: horizon :math:`\beta` of the statistics; 0.999 looks back about 1,000 steps.
        c: overconfidence :math:`c`; infinity disables the scaling.
        eps: :math:`\epsilon` of the standard error. It is absolute: lower it (down to 0) if
            gradients are below about 1e-6.
        measure: the conformity measure; see :func:`cprop.conformity_scale`.
        state_dtype: storage format of the statistics: ``"float32"``, or ``"bfloat16"`` with stochastic rounding.
        foreach: whether CProp uses the foreach implementation; by default, the inner optimizer's setting.
        fused: whether CProp uses compiled kernels; by default, the inner optimizer's setting.

    These settings are stored in every param group with the prefix ``cprop_``. A group that already
    has a setting keeps it.

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
        **misnamed: Any,
    ) -> None:
        refuse_unsuitable(optimizer)
        for name in misnamed:
            instead = f"write {name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else "it is not a CProp setting"
            if PREFIX + name.removeprefix(PREFIX) == ROUNDING:
                instead = "leave it out, the wrapper always rounds bfloat16 parameters stochastically"
            raise TypeError(f"CProp got an unexpected keyword argument {name!r}: {instead}")
        settings = {
            **Settings(beta, c, eps, measure, state_dtype).check()._asdict(),
            "cprop_foreach": foreach,
            "cprop_fused": fused,
        }
        for group in optimizer.param_groups:
            settings_of({**settings, **group}).check()
        for group in optimizer.param_groups:
            group.update({name: group.get(name, value) for name, value in settings.items()})
        # Optimizer.__init__ would create new groups and state, but they must be the inner optimizer's;
        # __setstate__ initializes everything else.
        self.__setstate__({"inner": optimizer, "defaults": {**optimizer.defaults, **settings}})
        self._start_statistics()

    @classmethod
    def around(cls, optimizer_class: type[Optimizer]) -> type[CProp]:
        """Wrap an optimizer class: the result is a class that takes parameters and keyword arguments.

        For frameworks that expect a class instead of an instance. CProp's settings have the prefix
        ``cprop_``, as in the param groups; all other arguments go to the inner optimizer. The class
        and its instances can be pickled.

        Example:
            >>> import torch, cprop
            >>> optimizer_class = cprop.CProp.around(torch.optim.AdamW)
            >>> optimizer = optimizer_class(torch.nn.Linear(4, 1).parameters(), lr=1e-3, cprop_c=2.0)
            >>> optimizer_class.__name__, type(optimizer.inner).__name__
            ('CPropAroundAdamW', 'AdamW')
        """
        return _around(optimizer_class)  # type: ignore[arg-type]  # a class is hashable

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: always the same list for both."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, with CProp's entries under the prefix ``cprop_``."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def __getstate__(self) -> dict[str, Any]:
        self._apply_edits()
        return {"inner": self.inner, "defaults": self.defaults}

    def __repr__(self) -> str:
        return f"CProp({self.inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the inner optimizer. It may contain CProp's settings."""
        own = {name: value for name, value in self.defaults.items() if name.startswith(PREFIX)}
        settings_of({**own, **param_group}).check()
        self.inner.add_param_group({**own, **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform a single step of the inner optimizer, and scale its update.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, if a closure was given.
        """
        loss, moved = self._begin_step(closure)
        observations: list[Callable[[], None]] = []
        scalings: list[Callable[[], None]] = []
        rescaled: list[Job] = []
        with self._statistics() as statistics:
            for group, params, places in moved:
                flags, implementation = WrapperFlags(group["cprop_measure"]), self._implementation(params, group)
                before, after = self._jobs(
                    params,
                    statistics,
                    group,
                    ((GRAD,), lambda p: (writable_gradient(p),)),
                    ((MOVED, SNAPSHOT), lambda p: (p, self._snapshot(p))),
                    places=places,
                )
                observations += prepare(observe_gradient, before, flags, implementation)
                scalings += prepare(rescale_update, after, flags, implementation)
                rescaled += after
            for _, params, _ in moved:
                count_up([statistics[p][STEP] for p in params])
            # Before the inner step, which may change or free the gradients.
            run_all(observations)
            self._step_inner(*([] if closure is None else [self._closure_with(loss)]))
            if not self.__dict__.setdefault("_warned", torch.compiler.is_compiling()):
                self._warned = True
                warn_of_weights_in_state(self.inner, ((row[0], row[1]) for job in rescaled for row in job.rows))
        run_all(scalings)
        return loss

    def _step_inner(self, *args: Any) -> None:
        """Run the inner optimizer's step with its own hooks, but without torch's global ones: our step runs those."""
        inner, step = self.inner, type(self.inner).step
        if torch.compiler.is_compiling() or "step" in vars(inner) or not getattr(step, "hooked", False):
            inner.step(*args)
            return
        kwargs: dict[str, Any] = {}
        args = (inner, *args)
        for hook in inner._optimizer_step_pre_hooks.values():
            replaced = hook(inner, args, kwargs)
            args, kwargs = (args, kwargs) if replaced is None else replaced
        step.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        for post_hook in inner._optimizer_step_post_hooks.values():
            post_hook(inner, args, kwargs)

    def _closure_with(self, loss: float | None) -> Callable[[], float | None]:
        """A closure that returns the known loss, and raises if the inner optimizer changed the weights first."""
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        versions = [p._version for p in params]

        def known_loss() -> float | None:
            if versions != [p._version for p in params]:
                name = type(self.inner).__name__
                raise RuntimeError(
                    f"{name} evaluates its closure again at other weights, but CProp uses one gradient per step: wrap "
                    f"its base optimizer instead, as in {name}(params, base_optimizer=CProp.around(torch.optim.Adam), "
                    "lr=1e-3)"
                )
            return loss

        return known_loss

    def _snapshot(self, p: Tensor) -> Tensor:
        """A copy of a parameter. On a CPU, its memory is reused in the next step.

        Fresh CPU memory is mapped page by page, which takes longer than the copy. On other devices
        it comes from torch's caching allocator, and is free again for the rest of the iteration.
        """
        if not p.is_cpu:
            return p.detach().clone()
        kept: dict[Tensor, Tensor] = self.__dict__.setdefault("_kept", {})
        if p not in kept or kept[p].shape != p.shape or kept[p].dtype != p.dtype or kept[p].stride() != p.stride():
            kept[p] = torch.empty_like(p, requires_grad=False)
        return kept[p].copy_(p)

    @staticmethod
    def _implementation(params: list[Tensor], group: Mapping[str, Any]) -> Implementation:
        """The inner optimizer's implementation, unless the wrapper has its own setting."""
        foreach, fused = group["cprop_foreach"], group["cprop_fused"]
        if foreach is None and fused is None:
            foreach, fused = group.get("foreach"), group.get("fused")
        return choose_implementation(params, foreach, fused)

    def _start_statistics(self) -> None:
        """Allocate statistics for every parameter that already has inner state.

        The inner optimizer may be in mid-training, or allocate state in its constructor. Checkpoint
        libraries assume that existing state is complete.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p) and STEP not in self.state[p]:
                    self.state[p].update(self._placeholder(p, group))

    @contextmanager
    def _statistics(self) -> Iterator[Mapping[Tensor, dict[str, Any]]]:
        """The statistics of every parameter, hidden from the inner optimizer inside the context.

        Many optimizers initialize a parameter's state if ``len(state) == 0``, and would not if it
        contained CProp's.
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
        """The state of both optimizers as one ordinary ``state_dict``, loadable with ``weights_only=True``."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._apply_edits()
        state_dict = name_measures(self._complete_state(self.inner.state_dict()))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def _complete_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # Only if the inner optimizer has no state. Otherwise its part would be unknown, and if the checkpoint is loaded
        # without CProp, it would not initialize a parameter that already has some state.
        entries = (entry for entry in state_dict["state"].values() if isinstance(entry, Mapping))
        only_ours = all(str(key).startswith(PREFIX) for key in chain.from_iterable(entries))
        return super()._complete_state(state_dict) if only_ours else state_dict

    def _known_settings(self) -> Collection[str]:
        # Any other setting belongs to the inner optimizer, which may change it.
        return {name for name in self.defaults if name.startswith(PREFIX)} | TORCHS_SETTINGS

    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        saved_groups = state_dict["param_groups"]
        own: dict[Tensor, dict[str, Tensor]] = {}
        for present, group in zip(self.param_groups, saved_groups, strict=True):
            for p in present["params"]:
                entries = {key: value for key, value in saved.get(p, {}).items() if key.startswith(PREFIX)}
                checkpoint.all_or_none(entries, (STEP, MEAN, MEAN_SQUARE))
                if set(entries) != set(saved.get(p, {})) or not checkpoint.is_placeholder(entries):
                    own[p] = {key: read_state(key, value, p, group) for key, value in entries.items()}
        inner_state = dict(state_dict["state"])
        for i in chain.from_iterable(group["params"] for group in saved_groups):
            entries = {key: value for key, value in inner_state.pop(i, {}).items() if not key.startswith(PREFIX)}
            if entries:
                inner_state[i] = entries
        inner_groups = [{k: v for k, v in group.items() if k != checkpoint.MEASURE} for group in saved_groups]
        groups, state = self.param_groups, self.state
        try:
            self.inner.load_state_dict({**state_dict, "state": inner_state, "param_groups": inner_groups})
        except Exception:
            self.param_groups, self.state = groups, state
            raise
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group[checkpoint.MEASURE] = saved_group[checkpoint.MEASURE]
        for p, statistics in own.items():
            if statistics:
                self.state[p].update(statistics)
        self._start_statistics()


def writable_gradient(p: Tensor) -> Tensor:
    """A parameter's gradient, replaced by a copy if its elements share memory (an expanded tensor)."""
    g = cast("Tensor", p.grad)
    if 0 in g.stride() and not g.is_contiguous():
        p.grad = g = g.clone(memory_format=torch.contiguous_format)
    return g


def joint_signature(optimizer_class: type[Optimizer], around: Callable[..., None]) -> inspect.Signature:
    """An optimizer's arguments and CProp's, for tools that read which arguments a class takes, such as LightningCLI."""
    inner, own = (inspect.signature(function).parameters for function in (optimizer_class.__init__, around))
    rest = [p for p in inner.values() if p.kind is p.VAR_KEYWORD]
    named = [p for p in inner.values() if p.kind is not p.VAR_KEYWORD]
    added = [p for name, p in own.items() if name.startswith(PREFIX) and name not in inner]
    return inspect.Signature([*named, *added, *rest])


class _Around(type):
    """Metaclass of the classes that :meth:`CProp.around` returns, which makes them picklable."""

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
        for name in {"beta", "c", "measure", "state_dtype"} & kwargs.keys() - inspect.signature(
            optimizer_class
        ).parameters:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}: write {PREFIX}{name}")
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

    __init__.__signature__ = joint_signature(optimizer_class, __init__)  # type: ignore[attr-defined]
    name = f"CPropAround{optimizer_class.__name__}"
    around: Any = _Around(
        name,
        (CProp,),
        {
            "__init__": __init__,
            "__module__": CProp.__module__,
            "__doc__": f"{optimizer_class.__qualname__} + CProp, built from its arguments.",
            "optimizer_class": optimizer_class,
        },
    )
    return cast("type[CProp]", around)


def _reduce_around(cls: _Around) -> tuple[Callable[..., type[CProp]], tuple[type[Optimizer]]]:
    return _around, (cls.optimizer_class,)


copyreg.pickle(_Around, _reduce_around)  # type: ignore[arg-type]
