"""torchtitan's container of optimizers, with CProp's by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from cprop.optimizers import CProp, CPropAdaBound, CPropAdam, CPropAdamW, CPropRMSprop, CPropSGD

__all__ = ["CPropOptimizersContainer"]

NATIVES = {cls.__name__: cls for cls in (CPropAdaBound, CPropAdam, CPropAdamW, CPropRMSprop, CPropSGD)}


class CPropOptimizersContainer(OptimizersContainer):  # type: ignore[misc]  # torchtitan is not installed with ours
    """torchtitan's container of optimizers, which also knows CProp's.

    Use its ``Config`` in place of torchtitan's. In a param group, ``optimizer_name`` may be the name of a native
    optimizer, such as ``"CPropAdamW"``, or ``"CProp(AdamW)"`` for a wrapped one of torchtitan's.
    ``optimizer_kwargs`` may contain CProp's settings.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The same as torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name in NATIVES:
            return NATIVES[name]
        plain: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(
            name.removeprefix("CProp(").removesuffix(")")
        )
        return (lambda *args, **kwargs: CProp(plain(*args, **kwargs))) if name.startswith("CProp(") else plain
