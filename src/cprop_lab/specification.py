"""What a run is: everything that decides its numbers, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

__all__ = ["NUMERICS", "Specification"]

Precision = Literal["float32", "bfloat16"]
Setting = bool | int | float | str

# The version of the code that decides a run's numbers: training, networks, data, optimizers. Runs of another version
# are other runs. A hash of the sources would throw results away for a comment; so this number is raised by hand, and a
# test that trains a little and compares with numbers on record says when.
NUMERICS: Final = 2


def _frozen(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    return MappingProxyType(dict(sorted(settings.items())))


@dataclass(frozen=True)
class Specification:
    """One training run, given in full: the same specification makes the same curves.

    Args:
        workload: a name of ``cprop-lab list``, or ``module:Task`` for a task of your own.
        optimizer: a name of ``cprop_lab.optimizers.RECIPES``; ``cprop-`` before it scales its updates, ``+cosine``
            after it decays the learning rate to zero, ``+ema`` averages the weights for evaluation.
        lr: the learning rate, at the start where it decays.
        seed: decides the initial weights, the order of the data, augmentation and dropout.
        iterations: how many steps.
        precision: ``"bfloat16"`` runs the network under autocast; parameters and optimizer stay in float32.
        settings: of the optimizer, beyond its learning rate.
        options: of the workload, such as ``dropout``.
        evaluate_every: iterations between two rows of the curves.
        examples: how many examples of the training data, and of the test data, an evaluation looks at.

    Example:
        >>> run = Specification("fmnist-fc", "cprop-adam", lr=1e-3, iterations=100)
        >>> Specification.from_json(run.to_json()) == run
        True
        >>> run.but(seed=1).seed
        1
    """

    workload: str
    optimizer: str
    lr: float
    seed: int = 0
    batch_size: int = 32
    iterations: int = 20_000
    precision: Precision = "float32"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    options: Mapping[str, Setting] = field(default_factory=dict)
    evaluate_every: int = 500
    examples: int = 10_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", float(self.lr))
        object.__setattr__(self, "settings", _frozen(self.settings))
        object.__setattr__(self, "options", _frozen(self.options))
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}: it must be positive and finite")
        for name in ("batch_size", "iterations", "evaluate_every", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision is {self.precision!r}: choose one of {', '.join(get_args(Precision))}")

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Specification.from_json, (self.to_json(),)

    def but(self, **changes: Any) -> Specification:
        """The same run with some things changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "settings": dict(self.settings), "options": dict(self.options)}

    def to_json(self) -> str:
        """As text, always the same for the same run."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Specification:
        """The run that :meth:`to_json` wrote down.

        Raises:
            ValueError: if the text names something that a run does not have.
        """
        values = json.loads(text)
        unknown = set(values) - {f.name for f in fields(Specification)}
        if unknown:
            raise ValueError(
                f"unknown fields {', '.join(sorted(unknown))}: the specification was written by another version"
            )
        return Specification(**values)

    def group(self) -> Specification:
        """What runs that differ in their seed alone have in common."""
        return self.but(seed=0)


def identity(resolved: Mapping[str, Any]) -> str:
    """The name of a run: sixteen digits that follow from all that decides its numbers."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:16]
