"""The base class of the native optimizers, which run an algorithm and CProp in one rule."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cprop import checkpoint
from cprop.arithmetic import Number
from cprop.execution import Implementation, check_implementation, choose_implementation, prepare, run_all
from cprop.optimizers.base import ConformityOptimizer
from cprop.optimizers.settings import ROUNDING, check_lr, refuse_misnamed
from cprop.optimizers.state import count_up, foreign_state, read_state
from cprop.rules import GRAD, MOVED, PARAM, rounding_stochastically
from cprop.statistics import AVERAGES, EARLIER, MEAN, MEAN_SQUARE, STEP, StatisticsScalars

__all__ = ["NativeOptimizer"]

STATISTICS: Final = (STEP, EARLIER, *AVERAGES)
COLUMNS: Final = (PARAM, GRAD), lambda p: (p, p.grad)
"""The tensors of a rule besides the state."""
ROUNDED_COLUMNS: Final = (MOVED, GRAD), COLUMNS[1]


class NativeOptimizer(ConformityOptimizer):
    """Base class of the native optimizers, which run an algorithm and CProp in one rule.

    A subclass defines the rule, its state, and its scalars and flags.
    """

    rule: ClassVar[staticmethod[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]]
    rounded_rule: ClassVar[staticmethod[[Mapping[str, Tensor], Any, Any], dict[str, Tensor]]]
    """The rule with stochastic rounding of bfloat16 parameters."""
    counts_steps = True
    switched_state: ClassVar[tuple[str, ...]] = ()
    """State that a setting switches on and off. If switched off, existing state stays unchanged, as in torch."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "rule" in vars(cls):  # once per class, because kernels are cached by their rule
            cls.rounded_rule = staticmethod(rounding_stochastically(cls.rule))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. It may contain CProp's settings."""
        refuse_misnamed(param_group, self.defaults)
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @abstractmethod
    def _scalars(self, group: Mapping[str, Any], t: Number, fresh: bool, statistics: StatisticsScalars) -> Any: ...

    @abstractmethod
    def _flags(self, group: Mapping[str, Any]) -> Any:
        """The flags that select the rule's formula."""

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_implementation(group["foreach"], group["fused"])
        check_lr(group["lr"])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            The closure's loss, if a closure was given.
        """
        loss, active = self._begin_step(closure)
        runs: list[Callable[[], None]] = []
        for group, params, places in active:
            rule, columns = (self.rounded_rule, ROUNDED_COLUMNS) if group[ROUNDING] else (self.rule, COLUMNS)
            (jobs,) = self._jobs(params, self.state, with_scalar_lr(group), columns, places=places)
            runs += prepare(rule, jobs, self._flags(group), self._implementation(params, group))
        for _, params, _ in active:
            count_up([self.state[p][counter] for p in params for counter in self._counters()])
        run_all(runs)
        return loss

    @staticmethod
    def _implementation(params: list[Tensor], group: Mapping[str, Any]) -> Implementation:
        """The implementation set in the group, or the one that torch would choose."""
        return choose_implementation(params, group["foreach"], group["fused"])

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

    def _packed_state(self) -> dict[str, Any]:
        # torch's method runs the hooks before the state is complete: here it finds none.
        unhooked = object.__new__(type(self))
        hooks: dict[str, Any] = {"_optimizer_state_dict_pre_hooks": {}, "_optimizer_state_dict_post_hooks": {}}
        unhooked.__dict__.update(self.__dict__, **hooks)
        return Optimizer.state_dict(unhooked)


def with_scalar_lr(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group with a 0-dim learning rate if it is a tensor: a parameter may be 0-dim, and must stay so."""
    lr = group["lr"]
    return {**group, "lr": lr.reshape(())} if isinstance(lr, Tensor) and lr.dim() else group
