"""What all optimizers of this package share: settings in param groups, statistics in the state, and checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from cprop import checkpoint
from cprop.arithmetic import TINY, Number, at_least, one_minus_power
from cprop.conformity import scale_of
from cprop.execution import Implementation, Job, draw_of
from cprop.measures import needs_mean_abs
from cprop.moments import Moments
from cprop.optimizers.settings import Settings, settings_of
from cprop.optimizers.state import count, new_counter, new_state, portable
from cprop.rules import write
from cprop.sharding import local, sharded_like
from cprop.statistics import (
    AVERAGES,
    EARLIER,
    MEAN,
    MEAN_ABS,
    MEAN_SQUARE,
    STEP,
    StatisticsScalars,
    moments_from,
    statistics_scalars,
    steps_at,
)
from cprop.storage import load

__all__ = ["ConformityOptimizer"]


class ActiveGroup(NamedTuple):
    """A param group, and its parameters that have a gradient in this step."""

    group: dict[str, Any]
    params: list[Tensor]
    places: list[int]
    """The place of each parameter among all of the optimizer's: equal parameters are rounded differently by it."""


class ConformityOptimizer(Optimizer):
    """Base class of all optimizers in this package: settings in the groups, statistics in the state."""

    shared_square: ClassVar[str | None] = None
    """State key of the algorithm's mean square that the statistics may share; its counter is ``step``."""
    counts_steps: ClassVar[bool] = False
    """Whether the algorithm has its own step counter, under torch's key ``step``."""

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the algorithm's own state tensors, as in torch."""
        return ()

    def _shares_square(self, group: Mapping[str, Any]) -> bool:
        """Whether the algorithm's mean square equals the one that the statistics need."""
        return False

    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> Any:
        """The scalars of the rule at the algorithm's step ``t``; ``fresh`` means that its state is new."""
        return statistics

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise if a setting is out of range, whether from the constructor, a param group or a checkpoint."""
        settings_of(group).check()

    @property
    def _own_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The dictionaries that hold the statistics."""
        own: Mapping[Tensor, dict[str, Any]] = self.state
        return own

    @staticmethod
    @abstractmethod
    def _implementation(params: list[Tensor], group: Mapping[str, Any]) -> Implementation:
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
            # On the shard, as a step does: DTensor has no sharding strategy for some operations.
            shard = scale_of(moments.local(), group["cprop_c"], group["cprop_measure"])
            yield p, sharded_like(moments.m, shard)

    def moments(self) -> Iterator[tuple[Tensor, dict[str, Any], Moments]]:
        """Iterate over parameters that have had a gradient, with their group and their current statistics."""
        self._apply_edits()
        for group in self.param_groups:
            for p in group["params"]:
                state = self._own_state.get(p, {})
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

    def _complete_groups(self) -> None:
        """Fill in settings that a group lacks because another optimizer has added or replaced it."""

    def _apply_edits(self) -> None:
        """Check settings that were edited since the last step.

        Raises if one is out of range. If ``cprop_beta`` changed, converts the statistics.
        """
        if torch.compiler.is_compiling():
            return
        self._complete_groups()
        seen: dict[int, tuple[dict[str, Any], Settings]] = self.__dict__.setdefault("_seen", {})
        for index in range(len(self.param_groups), len(seen)):
            del seen[index]  # removed groups must not keep their parameters alive
        for index, group in enumerate(self.param_groups):
            settings = settings_of(group)
            known, before = seen.get(index, (None, settings))
            # If a setting is still the same tensor, == does not read it, which would synchronize with the device.
            if known is group and settings == before:
                continue
            settings.check()
            if known is group and settings.cprop_beta != before.cprop_beta:
                self._change_beta(group, before.cprop_beta)
            seen[index] = group, settings

    @torch.no_grad()
    def _change_beta(self, group: Mapping[str, Any], before: float) -> None:
        """Convert the statistics to a new ``cprop_beta``, keeping the means and their effective number of gradients.

        A mean square shared with the algorithm becomes CProp's own.
        """
        for p in group["params"]:
            state = self._own_state.get(p, {})
            if STEP not in state or state[STEP] == 0:
                continue
            k = self._statistics_scalars(state, {**group, "cprop_beta": before, "capturable": False}).corrections
            t = float(state[STEP])
            state[STEP].fill_(steps_at(group["cprop_beta"], t, before))
            if state[STEP] != t:
                earlier = state.setdefault(EARLIER, new_counter(EARLIER, p, group))
                earlier.add_(t - float(state[STEP]))
            b = one_minus_power(group["cprop_beta"], float(state[STEP]))
            square = state[self._square_key(state)]
            if MEAN_SQUARE not in state:
                state[MEAN_SQUARE] = new_state(p, group)
            converted = {MEAN_SQUARE: load(local(square)) * (b / k.b_v)}
            converted |= {key: load(local(state[key])) * (b / k.b) for key in (MEAN, MEAN_ABS) if key in state}
            write({key: local(state[key]) for key in converted}, converted, draw_of(p, t, 0, flat=False))

    def _begin_step(self, closure: Callable[[], float] | None) -> tuple[float | None, list[ActiveGroup]]:
        """Evaluate the closure, if given, and check all gradients before any parameter is updated.

        Returns:
            The closure's loss, and each group with its parameters that have a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply_edits()
        active = []
        first = 0
        for index, group in enumerate(self.param_groups):
            params, places = [], []
            for place, p in enumerate(group["params"], first):
                g = p.grad
                if g is not None:
                    if g.layout is not torch.strided:
                        raise RuntimeError(
                            f"{type(self).__name__} does not support sparse gradients, and got one for a parameter "
                            f"of shape {tuple(p.shape)} in group {index}: build the layer with sparse=False, or "
                            "use a separate optimizer for that parameter, such as torch.optim.SparseAdam"
                        )
                    params.append(p)
                    places.append(place)
            first += len(group["params"])
            active.append(ActiveGroup(group, params, places))
        return loss, active

    def _counters(self) -> tuple[str, ...]:
        """The step counters of each parameter: CProp's, and the algorithm's own if it has one."""
        return ("step", STEP) if self.counts_steps else (STEP,)

    def _jobs(
        self,
        params: list[Tensor],
        states: Mapping[Tensor, dict[str, Any]],
        group: Mapping[str, Any],
        *columns: tuple[tuple[str, ...], Callable[[Tensor], tuple[Tensor, ...]]],
        places: Sequence[int] = (),
    ) -> list[list[Job]]:
        """Allocate missing state, and group parameters at the same step into jobs.

        Args:
            params: parameters of a group.
            states: their state.
            group: the group.
            columns: for each rule of the step, the names of its tensors besides the state, and the function that
                gives them for a parameter.
            places: the place of each parameter among all.

        Returns:
            The jobs of each rule.
        """
        keys, shared = self._state_keys(group), self._shares_square(group)
        needs_abs = needs_mean_abs(group["cprop_measure"])
        jobs: dict[Any, list[Job]] = {}
        for p, place in zip(params, places or [0] * len(params), strict=True):
            state = states[p]
            fresh = self._allocate(p, state, group, keys, shared)
            if needs_abs:
                self._ensure_mean_abs(p, state, group)
            # Any other entries belong to other tools.
            names = (*keys, *(key for key in AVERAGES if key in state))
            t = own_t = count(state[STEP], group) + 1
            if self.counts_steps:
                t = count(state["step"], group) + 1
            key = (t, own_t, fresh, names)
            if key not in jobs:
                square_t = own_t if MEAN_SQUARE in state else t
                scalars = self._scalars(group, t, fresh, statistics_scalars(group, own_t, square_t))
                exact_t = state[STEP] + 1 if isinstance(own_t, Tensor) else own_t
                seeds: list[int] = []
                jobs[key] = [Job((*own_names, *names), [], scalars, exact_t, seeds) for own_names, _ in columns]
            tensors = [state[name] for name in names]
            for job, (_, own_tensors) in zip(jobs[key], columns, strict=True):
                job.rows.append((*own_tensors(p), *tensors))
            jobs[key][0].seeds.append(place)
        return [[of_rule[index] for of_rule in jobs.values()] for index in range(len(columns))]

    def _allocate(
        self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any], keys: tuple[str, ...], shared: bool
    ) -> bool:
        """Allocate a parameter's missing state; return whether any of the algorithm's state is new."""
        new = {key: new_state(p, group) for key in keys if key not in state}
        fresh = bool(new)
        if self.counts_steps and "step" not in state:
            new["step"] = new_counter("step", p, group)
        if STEP not in state:
            new[STEP] = new_counter(STEP, p, group)
            new.update({key: new_state(p, group) for key in ((MEAN,) if shared else (MEAN, MEAN_SQUARE))})
        elif not shared and MEAN_SQUARE not in state:
            # The mean square can no longer be shared: CProp's own starts from the shared one.
            k, shared_square = self._statistics_scalars(state, group).corrections, state[self._square_key(state)]
            new[MEAN_SQUARE] = new_state(p, group)
            new[MEAN_SQUARE].copy_(load(shared_square) * (k.b / at_least(k.b_v, TINY)))
        state.update(new)  # at once, so that Ctrl-C leaves all of it or nothing
        return fresh

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``, keeping the dtype of the statistics.

        Settings that are missing from the checkpoint keep their current values. A checkpoint of the
        plain optimizer therefore works as a warm start: its state is loaded, and the statistics
        start empty, except for a mean square that is shared with the algorithm.

        Raises:
            CheckpointError: if the checkpoint is damaged or does not match; the optimizer is then unchanged.
        """
        with checkpoint.as_checkpoint_errors():
            state_dict = dict(state_dict)
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = hook(self, state_dict)
                state_dict = state_dict if replaced is None else replaced
            self._complete_groups()
            saved = checkpoint.match(state_dict, self.param_groups)
            groups = checkpoint.merge_settings(
                state_dict["param_groups"], self.param_groups, self.defaults, self._known_settings()
            )
            for group in groups:
                self._check(group)
            self._load({**state_dict, "param_groups": groups}, saved)
            self.__dict__.get("_seen", {}).clear()
            self._apply_edits()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _known_settings(self) -> Collection[str]:
        """The settings whose kind never changes: a different kind in a checkpoint means that it is damaged."""
        return self.defaults

    def __getstate__(self) -> dict[str, Any]:
        self._apply_edits()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._apply_edits()  # so that later edits are noticed

    def state_dict(self) -> dict[str, Any]:
        """The state as a dict, as in torch; loadable with ``weights_only=True``.

        If parameters have not had a gradient yet, and the algorithm's state is known, they are saved with zero state,
        because checkpoint libraries expect the same entries for every parameter. Loading drops these entries again.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._apply_edits()
        state_dict = portable(self._complete_state(self._packed_state()))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    @abstractmethod
    def _packed_state(self) -> dict[str, Any]:
        """The state and the groups with numbers for parameters, as in torch, before hooks."""

    def _complete_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add zero state for parameters without a gradient so far, if any other parameter has state."""
        state = state_dict["state"]
        if state:
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
                for i, p in zip(saved["params"], group["params"], strict=True):
                    if STEP not in state.get(i, {}) and p.requires_grad and not is_lazy(p):
                        state[i] = {**state.get(i, {}), **self._placeholder(p, group)}
        return state_dict

    def _placeholder(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The zero state of a parameter that has not had a gradient yet."""
        statistics = (MEAN,) if self._shares_square(group) else (MEAN, MEAN_SQUARE)
        keys = (*self._state_keys(group), *statistics)
        return {key: new_counter(key, p, group) for key in self._counters()} | {
            key: new_state(p, group) for key in keys
        }

    @abstractmethod
    def _load(self, state_dict: dict[str, Any], saved: dict[Tensor, dict[str, Any]]) -> None:
        """Load a checkpoint whose groups have been checked and completed."""
