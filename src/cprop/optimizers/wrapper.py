"""The wrapper: any optimizer + CProp."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Never, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.weak import TensorWeakRef

from cprop import checkpoint
from cprop.execution import Implementation, Job, check_implementation, choose_implementation, prepare, run_all
from cprop.measures import Measure
from cprop.optimizers.around import around
from cprop.optimizers.base import ActiveGroup, ConformityOptimizer
from cprop.optimizers.merged_state import MergedState, Statistics, is_own, plain, split
from cprop.optimizers.settings import ROUNDING, Settings, documented, refuse_misnamed
from cprop.optimizers.state import count_up, read_state
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


class Snapshot(NamedTuple):
    """Memory for copies of a parameter. It ends with the parameter, which it does not keep alive."""

    of: weakref.ref[Tensor]
    copy: Tensor


class WrapperFlags(NamedTuple):
    measure: str | Measure


class Kept:
    """What the wrapper keeps with its inner optimizer, as an attribute of that.

    So a second wrapper around it continues where the first one stopped.
    """

    def __init__(self) -> None:
        self.statistics: Statistics = defaultdict(dict)
        self.seen: dict[int, tuple[dict[str, Any], Settings]] = {}
        self.settings: dict[str, Any] = {}
        """Those that the wrapper filled in, unless a group had its own."""
        self.searched: Any = None
        """The inner optimizer's state when it was last searched for statistics."""


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


@documented
class CProp(ConformityOptimizer):
    r"""Wraps any optimizer, and scales its updates down where past gradients disagree (Algorithm 1).

    .. math::
        \theta_t = \theta_{t-1} + \hat s_t \cdot \hat g_t, \qquad
        \hat g_t = \text{the inner optimizer's update}

    with the scale :math:`\hat s_t \in [0, 1]` of :func:`cprop.conformity_scale`, computed from the raw
    gradients. The wrapper is itself a :class:`torch.optim.Optimizer`. It shares its groups with the inner
    one, and its state shows the inner one's beside the statistics. Pass the wrapper, not the inner
    optimizer, to schedulers, gradient scalers and trainers.

    The inner optimizer must keep its weights only in the parameters. Copies in its state, such as
    Lookahead's slow weights or master weights, are not scaled. If this can be detected, as for
    Schedule-Free, the constructor raises an error.

    All changes by the inner optimizer are scaled, including decoupled weight decay; use
    :class:`CPropAdamW` to leave it unscaled. A step copies the parameters once, which the native
    optimizers avoid. NaN and infinite gradient elements count as zero, and are set to zero in
    ``p.grad``, which keeps them out of the inner optimizer's state as well. All other elements keep
    their values, also for a graph with ``p.grad``, which can still be differentiated. A gradient
    computed in inference mode cannot be written to, so ``p.grad`` becomes a copy of it.

    Args:
        optimizer: the inner optimizer, new or in mid-training.
        {beta, c, eps, measure}
        state_dtype: storage format of the statistics: ``"float32"``, or ``"bfloat16"`` with stochastic rounding.
        foreach: whether CProp uses the foreach implementation; by default, the inner optimizer's setting.
        fused: whether CProp uses compiled kernels; by default, the inner optimizer's setting.

    These settings are stored in every param group with the prefix ``cprop_``. A group that already
    has a setting keeps it, except from an earlier wrapper: wrapping an optimizer again continues its
    statistics with the new settings.

    If a step raises an error or is interrupted, the weights are set back to those before it.

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
        eps: float = 0.0,
        measure: str | Measure = "normal",
        *,
        state_dtype: str = "float32",
        foreach: bool | None = None,
        fused: bool | None = None,
        **misnamed: Never,
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
        # A group keeps its own settings, but not those that an earlier wrapper filled in.
        earlier = kept_with(optimizer).settings
        of_groups = [
            {k: v for k, v in settings.items() if k not in group or (k in earlier and same(group[k], earlier[k]))}
            for group in optimizer.param_groups
        ]
        for group, own in zip(optimizer.param_groups, of_groups, strict=True):
            refuse_misnamed(group, {**optimizer.defaults, **settings, ROUNDING: None})
            self._check({**group, **own})
        for group, own in zip(optimizer.param_groups, of_groups, strict=True):
            group.update(own)
        # Optimizer.__init__ would create new groups and state, but they must be the inner optimizer's;
        # __setstate__ initializes everything else.
        self.__setstate__({"inner": optimizer, "defaults": {**optimizer.defaults, **settings}})
        self._start_statistics()

    @classmethod
    def around(cls, optimizer_class: type[Optimizer]) -> type[CPropAround]:
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
        made: type[CPropAround] = around(CProp, optimizer_class)  # type: ignore[arg-type]  # a class is hashable
        return made

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: always the same list for both."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, and CProp's entries under the prefix ``cprop_``, as one mapping.

        ``optimizer.inner.state`` has the inner optimizer's entries only.
        """
        self._take_statistics()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        entries = {key: plain(value) for key, value in state.items()}
        self.inner.state = defaultdict(dict)
        self._kept.statistics.clear()
        self._state.update(entries)

    @property
    def _own_state(self) -> Statistics:
        self._take_statistics()
        return self._kept.statistics

    def _take_statistics(self) -> None:
        """Take statistics out of the inner optimizer's state, where a checkpoint or an old pickle may have put them.

        Raises:
            RuntimeError: if torch has rounded them.
        """
        kept, state = self._kept, self.inner.state
        if kept.searched is state or torch.compiler.is_compiling():
            return
        for group in self.param_groups:
            for p in group["params"]:
                entries = state.get(p)
                if not isinstance(entries, MutableMapping):
                    continue
                own, _ = split(entries)
                if own.get(STEP) is not None and torch.finfo(own[STEP].dtype).bits < 32:
                    raise RuntimeError(
                        f"a checkpoint of CProp was loaded into its inner optimizer, {type(self.inner).__name__}, "
                        f"which rounded the statistics to {own[STEP].dtype}: load it with CProp's own load_state_dict"
                    )
                if own:
                    kept.statistics[p] = own
                    for key in own:
                        del entries[key]
        kept.searched = state

    def _complete_groups(self) -> None:
        # A group may have been added to the inner optimizer, or replaced when a checkpoint was loaded into it.
        settings = self._kept.settings
        for index, group in enumerate(self.param_groups):
            if missing := settings.keys() - group.keys():
                before, _ = self._seen.get(index, (settings, None))
                group.update({name: before[name] for name in missing})

    def __getstate__(self) -> dict[str, Any]:
        self._apply_edits()
        return {"inner": self.inner, "defaults": self.defaults, "statistics": self._own_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = self._kept = kept_with(state["inner"])
        kept.settings = {name: value for name, value in state["defaults"].items() if name.startswith(PREFIX)}
        kept.statistics.update(state.get("statistics", {}))
        self._state = MergedState(state["inner"], kept.statistics)
        self._seen = kept.seen
        super().__setstate__({name: value for name, value in state.items() if name != "statistics"})

    def __repr__(self) -> str:
        return f"CProp({self.inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the inner optimizer. It may contain CProp's settings."""
        own = {name: value for name, value in self.defaults.items() if name.startswith(PREFIX)}
        refuse_misnamed(param_group, {**self.defaults, ROUNDING: None})
        self._check({**self.defaults, **param_group})
        self.inner.add_param_group({**own, **param_group})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single step of the inner optimizer, and scale its update.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, if a closure was given.
        """
        loss, active = self._begin_step(closure)
        statistics = self._own_state
        active = list(map(unique, active))
        counted = self._already_counted(active)
        if counted:
            count_up([statistics[p][STEP] for _, params, _ in active for p in params], -1.0)
        observations, scalings, rescaled = self._prepare(active, statistics)
        for _, params, _ in active:
            count_up([statistics[p][STEP] for p in params])
        try:
            if not counted:
                # Before the inner step, which may change or free the gradients.
                run_all(observations)
                counted = True
            self._step_inner(*([] if closure is None else [self._closure_with(loss)]))
            run_all(scalings)
        except BaseException:  # Ctrl-C too
            for job in rescaled:
                for row in job.rows:
                    row[0].copy_(row[1])
            if counted:
                self._counted = gradient_versions(active)
            raise
        if not self.__dict__.setdefault("_warned", torch.compiler.is_compiling()):
            self._warned = True
            snapshots = {row[0]: row[1] for job in rescaled for row in job.rows}
            first = ((p, snapshots[p], moments.m_hat) for p, _, moments in self.moments() if p in snapshots)
            warn_of_weights_in_state(self.inner, first)
        return loss

    def _prepare(
        self, active: list[ActiveGroup], statistics: Statistics
    ) -> tuple[list[Callable[[], None]], list[Callable[[], None]], list[Job]]:
        """What runs before the inner optimizer's step and after it, and on which parameters."""
        observations: list[Callable[[], None]] = []
        scalings: list[Callable[[], None]] = []
        rescaled: list[Job] = []
        for group, params, places in active:
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
        return observations, scalings, rescaled

    def _already_counted(self, active: list[ActiveGroup]) -> bool:
        """Whether the statistics have these gradients, from a step that failed."""
        if torch.compiler.is_compiling() or "_counted" not in self.__dict__:
            return False
        before, now = self.__dict__.pop("_counted"), gradient_versions(active)
        return len(before) == len(now) and all(
            a() is b() and version == version_now for (a, version), (b, version_now) in zip(before, now, strict=True)
        )

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
        if not p.is_cpu or torch.compiler.is_compiling():
            return p.detach().clone()
        snapshots: dict[int, Snapshot] = self.__dict__.setdefault("_snapshots", {})
        key = id(p)
        known = snapshots.get(key)
        if known is None or known.of() is not p or not alike(known.copy, p):
            of = weakref.ref(p, lambda _: snapshots.pop(key, None))
            known = snapshots[key] = Snapshot(of, torch.empty_like(p, requires_grad=False))
        return known.copy.copy_(p)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_implementation(*implementation_flags(group))

    @staticmethod
    def _implementation(params: list[Tensor], group: Mapping[str, Any]) -> Implementation:
        """The inner optimizer's implementation, unless the wrapper has its own setting."""
        return choose_implementation(params, *implementation_flags(group))

    def _start_statistics(self) -> None:
        """Allocate statistics for every parameter that already has inner state.

        The inner optimizer may be in mid-training, or allocate state in its constructor. Checkpoint
        libraries assume that existing state is complete.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if self.inner.state.get(p) and STEP not in self._own_state.get(p, {}):
                    self._kept.statistics[p].update(self._placeholder(p, group))

    def _packed_state(self) -> dict[str, Any]:
        state_dict = self.inner.state_dict()
        state = dict(state_dict["state"])
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for i, p in zip(saved["params"], group["params"], strict=True):
                if own := self._own_state.get(p):
                    state[i] = {**state.get(i, {}), **own}
        return {**state_dict, "state": state}

    def _complete_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # Only if the inner optimizer has no state. Otherwise its part would be unknown, and if the checkpoint is loaded
        # without CProp, it would not initialize a parameter that already has some state.
        entries = (entry for entry in state_dict["state"].values() if isinstance(entry, Mapping))
        only_ours = all(map(is_own, chain.from_iterable(entries)))
        return super()._complete_state(state_dict) if only_ours else state_dict

    def _known_settings(self) -> Collection[str]:
        # Any other setting belongs to the inner optimizer, which may change it.
        return {name for name in self.defaults if name.startswith(PREFIX)} | TORCHS_SETTINGS

    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        saved_groups = state_dict["param_groups"]
        statistics: dict[Tensor, dict[str, Tensor]] = {}
        for present, group in zip(self.param_groups, saved_groups, strict=True):
            for p in present["params"]:
                own, others = split(saved.get(p, {}))
                checkpoint.all_or_none(own, (STEP, MEAN, MEAN_SQUARE))
                if own and (others or not checkpoint.is_placeholder(own)):
                    statistics[p] = {key: read_state(key, value, p, group) for key, value in own.items()}
        inner_state = dict(state_dict["state"])
        for i in chain.from_iterable(group["params"] for group in saved_groups):
            _, others = split(inner_state.pop(i, {}))
            if others:
                inner_state[i] = others
        inner_groups = [{k: v for k, v in group.items() if k != checkpoint.MEASURE} for group in saved_groups]
        groups, state = self.inner.param_groups, self.inner.state
        try:
            self.inner.load_state_dict({**state_dict, "state": inner_state, "param_groups": inner_groups})
        except Exception:
            self.inner.param_groups, self.inner.state = groups, state
            raise
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group[checkpoint.MEASURE] = saved_group[checkpoint.MEASURE]
        self._kept.searched = self.inner.state
        self._kept.statistics.clear()
        self._kept.statistics.update(statistics)
        self._start_statistics()


def kept_with(optimizer: Optimizer) -> Kept:
    """What wrappers keep with an inner optimizer."""
    kept: Kept = vars(optimizer).setdefault("_cprop", Kept())
    return kept


def same(a: Any, b: Any) -> bool:
    """Whether two settings are equal, without reading a tensor, which would synchronize with its device."""
    return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)


def unique(active: ActiveGroup) -> ActiveGroup:
    """Each parameter once: torch's optimizers accept duplicates, but a gradient is one observation."""
    params = active.params
    if torch.compiler.is_compiling() or len(set(map(id, params))) == len(params):
        return active
    places = dict(zip(reversed(params), reversed(active.places), strict=True))
    return active._replace(params=list(reversed(places)), places=list(reversed(places.values())))


def gradient_versions(active: list[ActiveGroup]) -> list[tuple[TensorWeakRef, int | None]]:
    """The gradients of all parameters, and how often each was written to."""
    gradients = [p.grad for _, params, _ in active for p in params if p.grad is not None]
    return [(TensorWeakRef(g), None if g.is_inference() else g._version) for g in gradients]


def implementation_flags(group: Mapping[str, Any]) -> tuple[bool | None, bool | None]:
    """The flags ``foreach`` and ``fused`` of a group: CProp's own if it has one, or else the inner optimizer's."""
    foreach, fused = group["cprop_foreach"], group["cprop_fused"]
    return (group.get("foreach"), group.get("fused")) if foreach is None and fused is None else (foreach, fused)


def writable_gradient(p: Tensor) -> Tensor:
    """A parameter's gradient, to write to.

    It is replaced by a copy if it cannot be written to: if it was computed in inference mode, or its elements share
    memory (an expanded tensor). Writing through ``data`` is not seen by autograd. A graph with this gradient can still
    be differentiated, because the elements that matter keep their values.
    """
    g = cast("Tensor", p.grad)
    traced = torch.compiler.is_compiling()
    frozen = not traced and g.is_inference() and not torch.is_inference_mode_enabled()
    if frozen or (0 in g.stride() and not g.is_contiguous()):
        p.grad = g = g.detach().clone(memory_format=torch.contiguous_format)
    return g if traced else g.data


def alike(copy: Tensor, p: Tensor) -> bool:
    """Whether memory for a copy of a parameter still fits it."""
    return copy.shape == p.shape and copy.dtype == p.dtype and copy.stride() == p.stride()


if TYPE_CHECKING:

    class CPropAround(CProp):
        """What :meth:`CProp.around` returns, as a type checker sees it."""

        def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None: ...
