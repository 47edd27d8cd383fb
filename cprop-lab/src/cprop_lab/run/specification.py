"""What a run is: everything that decides its numbers, and what tables and figures call it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, get_args
from weakref import WeakValueDictionary

from cprop_lab.run.names import CPROP_DEFAULTS, FLAGS, FUSED_WRAPPER, KNOBS, LATER, STATE, OptimizerName, parse
from cprop_lab.run.recipes import AVERAGES, SCHEDULES, Setting

__all__ = ["NUMERICS", "Precision", "Specification"]

Precision = Literal["float32", "bfloat16"]

# The version of the code that decides a run's numbers: training, networks, data, optimizers. Runs of another version
# are other runs. A hash of the sources would discard results because of a comment; so this number is raised by hand,
# and a test that trains briefly and compares with recorded numbers says when.
NUMERICS: Final = 2


TUNED: Final = ("weight_decay", "final_lr", *FLAGS)
"""Settings that are not part of an optimizer's name: they are selected, or change nothing but the time of a step."""


def _frozen(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    return MappingProxyType(dict(sorted(settings.items())))


@dataclass(frozen=True)
class Specification:
    """One training run, fully specified: the same specification gives the same curves.

    Args:
        workload: a name of ``cprop-lab list``, or ``module:Task`` for a task of your own.
        optimizer: a name of ``cprop_lab.run.recipes.RECIPES``; ``cprop-`` before it scales its updates, ``+cosine``
            and ``+wsd`` after it decay the learning rate to zero, ``+rsqrt`` and ``+inverse`` like the inverse square
            root and the inverse of time, and ``+average`` averages the weights for evaluation.
        lr: the learning rate, at the start where it decays.
        seed: of the initial weights, the order of the data, augmentation and dropout.
        iterations: number of steps.
        precision: ``"bfloat16"`` runs the network under autocast; parameters and optimizer stay in float32.
        settings: of the optimizer, beyond its learning rate.
        options: of the workload, such as ``dropout``.
        evaluate_every: iterations between two evaluations.
        examples: per evaluation, of the training and of the test data.

    Example:
        >>> run = Specification("fmnist-fc", "cprop-adam", lr=1e-3, iterations=100)
        >>> Specification.from_json(run.to_json()) == run
        True
        >>> run.replace(seed=1).seed
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
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Specification.from_json, (self.to_json(),)

    def replace(self, **changes: Any) -> Specification:
        """The same run with some things changed, as ``dataclasses.replace`` does."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "settings": dict(self.settings), "options": dict(self.options)}

    def to_json(self) -> str:
        """As text, the same for equal runs."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Specification:
        """The run that :meth:`to_json` wrote.

        Raises:
            ValueError: if the text has fields that a run does not have.
        """
        return Specification.from_dict(json.loads(text))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Specification:
        """The run that :meth:`to_dict` gave.

        Raises:
            ValueError: if there are fields that a run does not have.
        """
        unknown = set(values) - {f.name for f in fields(Specification)}
        if unknown:
            raise ValueError(
                f"unknown fields {', '.join(sorted(unknown))}: the specification was written by another version"
            )
        return Specification(**values)

    def group(self) -> Specification:
        """The same for all runs that only differ in their seed."""
        return self._group

    @cached_property
    def _group(self) -> Specification:
        group = self.replace(seed=0)
        return _GROUPS.setdefault(group, group)

    # Its optimizer.

    @cached_property
    def optimizer_name(self) -> OptimizerName:
        """The optimizer's name, taken apart once.

        Raises:
            ValueError: if there is no such optimizer.
        """
        return parse(self.optimizer)

    @property
    def knobs(self) -> dict[str, float]:
        """How the settings of CProp that experiments vary are set."""
        return {key: float(self.settings.get(key, CPROP_DEFAULTS[key])) for key in KNOBS}

    def resolved_settings(self) -> dict[str, Setting]:
        """All settings of its optimizer, with the defaults that it does not name.

        Raises:
            ValueError: if it names a setting that the optimizer does not have.
        """
        name = self.optimizer_name
        defaults = {**name.recipe.settings, **(CPROP_DEFAULTS if name.cprop else {})}
        if name.cprop:
            defaults[FUSED_WRAPPER if name.recipe.native is None else "fused"] = True
        unknown = set(self.settings) - set(defaults)
        if unknown:
            raise ValueError(
                f"{self.optimizer} has no setting {', '.join(sorted(unknown))}: it has {', '.join(defaults)}"
            )
        resolved = {**defaults, **self.settings}
        return {key: value for key, value in resolved.items() if key not in LATER or value != CPROP_DEFAULTS[key]}

    def eager(self) -> Specification:
        """The same run without compiled or fused steps, for machines that cannot compile."""
        flags = {flag: False for flag in FLAGS if flag in self.resolved_settings()}
        return self.replace(settings={**self.settings, **flags}) if flags else self

    # What tables and figures call it.

    @cached_property
    def label(self) -> str:
        """Its optimizer, with the settings that differ from the defaults, but for those that are tuned.

        Example:
            >>> Specification("fmnist-fc", "cprop-adam+average", lr=1e-3, settings={"cprop_c": 3.0}).label
            'CProp(Adam), c = 3, averaged'
            >>> Specification("ptb-gpt", "muon", lr=1e-3, settings={"beta2": 0.999, "weight_decay": 0.1}).label
            'Muon, beta2 = 0.999'
            >>> Specification("fmnist-fc", "cprop-adam", lr=1e-3, settings={"cprop_state_dtype": "bfloat16"}).label
            'CProp(Adam), bfloat16 state'
        """
        name = self.optimizer_name
        text = f"CProp({name.recipe.title})" if name.cprop else name.recipe.title
        measure = str(self.settings.get("cprop_measure", "normal"))
        text += f", {measure.replace('_', ' ')}" * (measure != "normal")
        if (stored := self.settings.get(STATE, CPROP_DEFAULTS[STATE])) != CPROP_DEFAULTS[STATE]:
            text += f", {stored} state"
        changed: dict[str, Setting] = {KNOBS[key]: v for key, v in self.knobs.items() if v != CPROP_DEFAULTS[key]}
        for key, default in name.recipe.settings.items():
            if key not in TUNED and self.settings.get(key, default) != default:
                changed[key] = self.settings[key]
        turned = (f", {key} = {v:g}" if isinstance(v, float) else f", {key} {v}" for key, v in changed.items())
        after = (SCHEDULES.get(name.schedule), AVERAGES.get(name.average))
        return text + "".join(turned) + "".join(f", {part}" for part in after if part)

    @cached_property
    def facet(self) -> str:
        """What distinguishes it from other runs of its experiment, besides its optimizer: options and batch size."""
        options = self.options.items()
        parts = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options]
        if self.batch_size != 32:
            parts.append(f"batch size {self.batch_size}")
        return f" ({', '.join(parts)})" if parts else ""

    @cached_property
    def workload_label(self) -> str:
        """Its workload, with what distinguishes it from others of its experiment."""
        return self.workload + self.facet


_GROUPS: Final[WeakValueDictionary[Specification, Specification]] = WeakValueDictionary()
"""One of each: a hundred thousand runs have few groups."""
