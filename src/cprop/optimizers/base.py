"""The base classes of all optimizers: param groups, state, checkpoints, hooks, and the step."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypedDict, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop import checkpoint
from cprop.arithmetic import Number, divided, one_minus_power
from cprop.conformity import (
    TINY,
    Measure,
    Moments,
    at_least,
    measure_name,
    needs_mean_abs,
    resolve_measure,
    scale_of,
)
from cprop.execution import Job, Way, choose, prepare, run_all
from cprop.moments import (
    AVERAGES,
    EARLIER,
    MEAN,
    MEAN_ABS,
    MEAN_SQUARE,
    PREFIX,
    STEP,
    StatisticsScalars,
    moments_from,
    statistics_scalars,
    steps_at,
)
from cprop.rules import GRAD, PARAM
from cprop.sharding import local
from cprop.storage import FORMATS, allocate, load, restore, store

__all__ = ["ConformityOptimizer", "NativeOptimizer", "Settings"]

COUNTERS: Final = ("step", STEP, EARLIER)
STATISTICS: Final = (STEP, EARLIER, *AVERAGES)


class Settings(NamedTuple):
    """CProp's hyperparameters, stored in every param group."""

    cprop_beta: float = 0.999
    cprop_c: float = 1.0
    cprop_eps: float = 1e-8
    cprop_measure: str | Measure = "normal"
    cprop_state_dtype: str = "float32"

    def check(self) -> Settings:
        """Return the settings, or raise an error that names the invalid one and the fix."""
        require(
            0.0 <= self.cprop_beta < 1.0,
            f"invalid cprop_beta {self.cprop_beta}: the horizon must be in [0, 1); 0.999 looks back about 1,000 steps",
        )
        require(
            self.cprop_c > 0.0,
            f"invalid cprop_c {self.cprop_c}: the overconfidence must be in (0, inf]; the paper uses 1, "
            "inf disables the scaling",
        )
        require(
            0.0 <= self.cprop_eps < math.inf,
            f"invalid cprop_eps {self.cprop_eps}: it must be in [0, inf); the paper uses 1e-8, 0 makes the scale "
            "independent of the gradients' magnitude",
        )
        require(
            self.cprop_state_dtype in FORMATS,
            f"invalid cprop_state_dtype {self.cprop_state_dtype!r}: choose one of {', '.join(map(repr, FORMATS))}",
        )
        resolve_measure(self.cprop_measure)
        return self


class Options(TypedDict, total=False):
    """Keyword arguments that all native optimizers have in common.

    The first four are torch's; the others are CProp's, as in :class:`Settings`.
    """

    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    cprop_beta: float
    cprop_c: float
    cprop_eps: float
    cprop_measure: str | Measure
    cprop_state_dtype: str


def complete(options: Options) -> dict[str, Any]:
    """The options with their defaults filled in."""
    defaults = {"maximize": False, "foreach": None, "fused": None, "capturable": False, **Settings()._asdict()}
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        meant = PREFIX + unknown[0]
        instead = f"write {meant}" if meant in defaults else f"choose from {', '.join(defaults)}"
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: {instead}")
    return {**defaults, **options}


def settings_of(group: Mapping[str, Any]) -> Settings:
    """CProp's settings in a param group or in the defaults."""
    return Settings(*(group[name] for name in Settings._fields))


def require(condition: bool, message: str) -> None:
    """Raise a ``ValueError`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_lr(lr: Number) -> None:
    """Raise if a learning rate is negative or not a single number."""
    require(not isinstance(lr, Tensor) or lr.numel() == 1, "a tensor lr must have one element")
    require(bool(lr >= 0.0), f"invalid lr {lr}: the learning rate must be at least 0")


def with_scalar_lr(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group with a 0-dim learning rate if it is a tensor: a parameter may be 0-dim, and must stay so."""
    lr = group["lr"]
    return {**group, "lr": lr.reshape(())} if isinstance(lr, Tensor) and lr.dim() else group


def check_non_negative(**values: float) -> None:
    """Raise if a hyperparameter is negative."""
    for name, value in values.items():
        require(value >= 0.0, f"invalid {name} {value}: it must be at least 0")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise if an averaging coefficient is outside [0, 1)."""
    for index, beta in enumerate(betas):
        require(0.0 <= beta < 1.0, f"invalid betas[{index}] {beta}: it must be in [0, 1)")


class Moved(NamedTuple):
    """A param group, and its parameters that have a gradient in this step."""

    group: dict[str, Any]
    params: list[Tensor]


class ConformityOptimizer(Optimizer):
    """Base class of all optimizers in this package: settings in the groups, statistics in the state."""

    shared_square: ClassVar[str | None] = None
    """State key of the algorithm's mean square that the statistics may share; its counter is ``step``."""

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise if a setting is out of range, whether from the constructor, a param group or a checkpoint."""
        settings_of(group).check()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. It may contain CProp's settings."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @staticmethod
    @abstractmethod
    def _way(params: list[Tensor], group: Mapping[str, Any]) -> Way:
        """The implementation of CProp's part (for-loop, foreach or fused) for parameters of a group."""

    def scales(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over parameters and their current scales, computed from the state.

        It is the scale that the last step applied, in float32 or float64, with the shape of the
        parameter (for complex parameters, of its real view). Parameters that have not had a
        gradient yet are skipped.

        Example:
            >>> import torch, cprop
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = cprop.CPropSGD([w], lr=0.1)
            >>> for g in ([1.0, 1.0], [1.0, -1.0], [1.0, 1.0]):  # one agrees, one does not
            ...     w.grad = torch.tensor(g)
            ...     optimizer.step()
            >>> [scale for _, scale in optimizer.scales()]
            [tensor([1.0000, 0.3827])]
        """
        for p, group, moments in self.moments():
            yield p, divided(scale_of(moments, group["cprop_c"], group["cprop_measure"]))

    def moments(self) -> Iterator[tuple[Tensor, dict[str, Any], Moments]]:
        """Iterate over parameters that have had a gradient, with their group and their current statistics."""
        self._look_at_settings()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if STEP in state and state[STEP] > 0:
                    yield p, group, self._moments(state, group)

    @torch.no_grad()
    def _moments(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
        square = self._square_key(state)
        stored = {key: state[key] for key in {*AVERAGES, square} & state.keys()}
        tensors = {key: load(torch.view_as_real(x) if x.is_complex() else x) for key, x in stored.items()}
        h = self._statistics_scalars(state, group)
        if needs_mean_abs(group["cprop_measure"]) and MEAN_ABS not in state:
            tensors[MEAN_ABS] = self._mean_abs_bound(tensors, h)
        return moments_from(tensors, h, group["cprop_measure"], None if square == MEAN_SQUARE else tensors[square])

    def _square_key(self, state: Mapping[str, Any]) -> str:
        """State key of a parameter's mean square: CProp's own, or the one shared with the algorithm."""
        return MEAN_SQUARE if MEAN_SQUARE in state else self.shared_square or MEAN_SQUARE

    def _statistics_scalars(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> StatisticsScalars:
        """The scalars at a parameter's current step."""
        square_counter = STEP if self._square_key(state) == MEAN_SQUARE else "step"
        return statistics_scalars(group, count(state[STEP], group), count(state[square_counter], group))

    def _ensure_mean_abs(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Allocate the mean absolute gradient for a measure that needs it, possibly in mid-training."""
        if MEAN_ABS not in state:
            mean_abs = new_state(p, group)
            if group.get("capturable") or state[STEP] > 0:
                mean_abs.copy_(self._mean_abs_bound(state, self._statistics_scalars(state, group)))
            state[MEAN_ABS] = mean_abs

    def _mean_abs_bound(self, tensors: Mapping[str, Tensor], h: StatisticsScalars) -> Tensor:
        """The root mean square, an upper bound of the mean absolute gradient.

        With this start the scale is too low at first; the difference decays within the horizon.
        """
        # A counter on a device is not read, so the correction may be zero.
        v_hat = load(tensors[self._square_key(tensors)]) / at_least(h.corrections.b_v, TINY)
        return v_hat.sqrt() * h.corrections.b

    def _look_at_settings(self) -> None:
        """Check settings that were edited since the last step.

        Raises if one is out of range. If ``cprop_beta`` changed, converts the statistics.
        """
        if torch.compiler.is_compiling():
            return
        seen: dict[int, tuple[dict[str, Any], Settings]] = self.__dict__.setdefault("_seen", {})
        for index, group in enumerate(self.param_groups):
            settings = settings_of(group)
            known, before = seen.get(index, (None, settings))
            # If a setting is still the same tensor, == does not read it, which would synchronize with the device.
            if known is group and settings == before:
                continue
            settings.check()
            if known is group and settings.cprop_beta != before.cprop_beta:
                self._carry_over(group, before.cprop_beta)
            seen[index] = group, settings

    @torch.no_grad()
    def _carry_over(self, group: Mapping[str, Any], before: float) -> None:
        """Convert the statistics to a new ``cprop_beta``, keeping the means and their effective number of gradients.

        A mean square shared with the algorithm becomes CProp's own.
        """
        for p in group["params"]:
            state = self.state.get(p, {})
            if STEP not in state or state[STEP] == 0:
                continue
            k = self._statistics_scalars(state, {**group, "cprop_beta": before, "capturable": False}).corrections
            t = float(state[STEP])
            state[STEP].fill_(steps_at(group["cprop_beta"], t, before))
            if state[STEP] != t:
                earlier = state.setdefault(EARLIER, new_counter(p, group))
                earlier.add_(t - float(state[STEP]))
            b = one_minus_power(group["cprop_beta"], float(state[STEP]))
            square = state[self._square_key(state)]
            if MEAN_SQUARE not in state:
                state[MEAN_SQUARE] = new_state(p, group)
            store(local(state[MEAN_SQUARE]), load(local(square)) * (b / k.b_v), t)
            for key in {MEAN, MEAN_ABS} & state.keys():
                store(local(state[key]), load(local(state[key])) * (b / k.b), t)

    def _begin_step(self, closure: Callable[[], float] | None) -> tuple[float | None, list[Moved]]:
        """Evaluate the closure, if given, and check all gradients before any parameter is updated.

        Returns:
            The closure's loss, and each group with its parameters that have a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_at_settings()
        moved = []
        for index, group in enumerate(self.param_groups):
            params = []
            for p in group["params"]:
                g = p.grad
                if g is not None:
                    if g.layout is not torch.strided:
                        raise RuntimeError(
                            f"{type(self).__name__} does not support sparse gradients, and got one for a parameter "
                            f"of shape {tuple(p.shape)} in group {index}: build the layer with sparse=False, or "
                            "use a separate optimizer for that parameter, such as torch.optim.SparseAdam"
                        )
                    params.append(p)
            moved.append(Moved(group, params))
        return loss, moved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``, keeping the dtype of the statistics.

        Settings that are missing from the checkpoint keep their current values. A checkpoint of the
        plain optimizer therefore works as a warm start: its state is loaded, and the statistics
        start empty, except for a mean square that is shared with the algorithm.

        Raises:
            CheckpointError: if the checkpoint is damaged or does not match; the optimizer is then unchanged.
        """
        with checkpoint.refusing_what_does_not_fit():
            state_dict = dict(state_dict)
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = hook(self, state_dict)
                state_dict = state_dict if replaced is None else replaced
            saved = checkpoint.match(state_dict, self.param_groups)
            groups = checkpoint.merge_settings(
                state_dict["param_groups"], self.param_groups, self.defaults, self._known_settings()
            )
            for group in groups:
                self._check(group)
            self._load({**state_dict, "param_groups": groups}, saved)
            self.__dict__.pop("_seen", None)
            self._look_at_settings()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _known_settings(self) -> Collection[str]:
        """The settings whose kind never changes: a different kind in a checkpoint means that it is damaged."""
        return self.defaults

    def __getstate__(self) -> dict[str, Any]:
        self._look_at_settings()
        return super().__getstate__()

    def _complete_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add zero state for parameters without a gradient so far, if any other parameter has state."""
        state = state_dict["state"]
        if state:
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
                for i, p in zip(saved["params"], group["params"], strict=True):
                    if STEP not in state.get(i, {}) and p.requires_grad:
                        state[i] = {**state.get(i, {}), **self._placeholder(p, group)}
        return state_dict

    @abstractmethod
    def _placeholder(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The zero state of a parameter that has not had a gradient yet."""

    @abstractmethod
    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        """Load a checkpoint whose groups have been checked and completed."""


def name_measures(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace callable measures with their names, so that the file loads with ``weights_only=True``."""
    for group in state_dict["param_groups"]:
        group["cprop_measure"] = measure_name(group["cprop_measure"])
    return state_dict


def new_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Zero state with the shape, layout and sharding of a parameter, in the group's format."""
    return allocate(p, group["cprop_state_dtype"])


def new_counter(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A step counter: on the CPU, where reading it is cheap, unless the group is capturable."""
    return torch.zeros((), dtype=torch.float32, device=p.device if group.get("capturable") else "cpu")


def read_state(key: str, saved: Any, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A saved counter or state tensor, in the form of :func:`new_counter` or :func:`new_state`."""
    if key in COUNTERS:
        counter = new_counter(p, group)
        return counter.fill_(checkpoint.check_counter(key, saved))
    tensor = checkpoint.check_tensor(key, saved, p.shape)
    return restore(tensor, p, group["cprop_state_dtype"])


def foreign_state(value: Any, p: Tensor) -> Any:
    """A copy of another tool's state entry, on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach().to(p.device if value.dim() else value.device, copy=True)
    return copy.deepcopy(value)


ONE: Final = torch.tensor(1.0, device="cpu")  # even if the default device is another one


def count_up(counters: list[Tensor]) -> None:
    """Add one to each counter."""
    if counters and counters[0].is_cpu and not torch.compiler.is_compiling():
        # A Python number would be converted to a tensor for each counter, which takes three times as long.
        torch._foreach_add_(counters, ONE, alpha=1.0)
    elif counters:
        torch._foreach_add_(counters, 1.0)


def count(counter: Tensor, group: Mapping[str, Any]) -> Number:
    """A counter's value: a number if the counter is on the CPU, or the tensor itself if the group is capturable."""
    return counter if group.get("capturable") else counter.item()


class NativeOptimizer(ConformityOptimizer):
    """Base class of the native optimizers, which run an algorithm and CProp in one rule.

    A subclass defines the rule, its state, and its scalars and flags.
    """

    rule: ClassVar[staticmethod[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]]
    counts_steps: ClassVar[bool] = True
    """Whether the algorithm has its own step counter, under torch's key ``step``."""
    switched_state: ClassVar[tuple[str, ...]] = ()
    """State that a setting switches on and off. If switched off, existing state stays unchanged, as in torch."""

    @abstractmethod
    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the algorithm's own state tensors, as in torch."""

    @abstractmethod
    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> Any:
        """The scalars of the rule at the algorithm's step ``t``; ``fresh`` means that its state is new."""

    @abstractmethod
    def _flags(self, group: Mapping[str, Any]) -> Any:
        """The flags that select the rule's formula."""

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_lr(group["lr"])

    def _shares_square(self, group: Mapping[str, Any]) -> bool:
        """Whether the algorithm's mean square equals the one that the statistics need."""
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, if a closure was given.
        """
        loss, moved = self._begin_step(closure)
        runs: list[Callable[[], None]] = []
        for group, params in moved:
            jobs = self._jobs(params, group)
            runs += prepare(type(self).rule, jobs, self._flags(group), self._way(params, group))
        for _, params in moved:
            count_up([self.state[p][counter] for p in params for counter in self._counters()])
        run_all(runs)
        return loss

    @staticmethod
    def _way(params: list[Tensor], group: Mapping[str, Any]) -> Way:
        """The implementation set in the group, or the one that torch would choose."""
        return choose(params, group["foreach"], group["fused"])

    def _counters(self) -> tuple[str, ...]:
        """The step counters of each parameter: CProp's, and the algorithm's own if it has one."""
        return ("step", STEP) if self.counts_steps else (STEP,)

    def _jobs(self, params: list[Tensor], group: Mapping[str, Any]) -> list[Job]:
        """Allocate missing state, and group parameters at the same step."""
        group = with_scalar_lr(group)
        keys, shared = self._state_keys(group), self._shares_square(group)
        needs_abs = needs_mean_abs(group["cprop_measure"])
        jobs: dict[Any, Job] = {}
        for p in params:
            first = self._prepare(p, group, keys, shared)
            state = self.state[p]
            if needs_abs:
                self._ensure_mean_abs(p, state, group)
            # Any other entries belong to other tools.
            names = (*keys, *(key for key in AVERAGES if key in state))
            t = own_t = count(state[STEP], group) + 1
            if self.counts_steps:
                t = count(state["step"], group) + 1
            key = (t, own_t, first, names)
            if key not in jobs:
                square_t = own_t if MEAN_SQUARE in state else t
                scalars = self._scalars(group, t, first, statistics_scalars(group, own_t, square_t))
                jobs[key] = Job((PARAM, GRAD, *names), [], scalars, own_t)
            jobs[key].rows.append((p, cast("Tensor", p.grad), *(state[name] for name in names)))
        return list(jobs.values())

    def _prepare(self, p: Tensor, group: Mapping[str, Any], keys: tuple[str, ...], shared: bool) -> bool:
        """Allocate a parameter's missing state; return whether any of the algorithm's state is new."""
        state = self.state[p]
        fresh = False
        for key in keys:
            if key not in state:
                state[key] = new_state(p, group)
                fresh = True
        if self.counts_steps and "step" not in state:
            state["step"] = new_counter(p, group)
        if STEP not in state:
            state[STEP] = new_counter(p, group)
            state.update({key: new_state(p, group) for key in ((MEAN,) if shared else (MEAN, MEAN_SQUARE))})
        elif not shared and MEAN_SQUARE not in state:
            # The mean square can no longer be shared: CProp's own starts from the shared one.
            k = self._statistics_scalars(state, group).corrections
            state[MEAN_SQUARE] = new_state(p, group)
            state[MEAN_SQUARE].copy_(load(state[self.shared_square]) * (k.b / at_least(k.b_v, TINY)))
        return fresh

    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        groups = [
            {**group, "params": present["params"]}
            for group, present in zip(state_dict["param_groups"], self.param_groups, strict=True)
        ]
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for group in groups:
            for p in group["params"]:
                if p in saved:
                    state[p] = self._read_state(p, group, saved[p])
        self.__setstate__({"state": state, "param_groups": groups})

    def _read_state(self, p: Tensor, group: Mapping[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        needed = self._state_keys(group) + (("step",) if self.counts_steps else ())
        known = {*needed, *self.switched_state, *STATISTICS}
        foreign = {key: foreign_state(value, p) for key, value in saved.items() if key not in known}
        own = {key: value for key, value in saved.items() if key in known and value is not None}
        if checkpoint.is_placeholder(own):
            return foreign
        if foreign and not own:
            raise checkpoint.CheckpointError(
                f"the checkpoint has state {sorted(foreign)}, and none of {type(self).__name__}'s state: "
                "it was saved by another optimizer"
            )
        checkpoint.all_or_none(own, needed)
        shared = self._shares_square(group) and self.shared_square in own
        checkpoint.all_or_none(own, (STEP, MEAN) if shared else (STEP, MEAN, MEAN_SQUARE))
        return {**foreign, **{key: read_state(key, value, p, group) for key, value in own.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The state as a dict, as in torch; loadable with ``weights_only=True``.

        Parameters that have not had a gradient yet are saved with zero state, because checkpoint
        libraries expect the same entries for every parameter. Loading drops these entries again.
        """
        self._look_at_settings()
        return name_measures(self._complete_state(super().state_dict()))

    def _placeholder(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        statistics = (MEAN,) if self._shares_square(group) else (MEAN, MEAN_SQUARE)
        keys = (*self._state_keys(group), *statistics)
        return {key: new_counter(p, group) for key in self._counters()} | {key: new_state(p, group) for key in keys}
