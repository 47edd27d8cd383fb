"""The optimizers that are compared: the paper's five, today's peers, and CProp around each of them.

A name is read from the inside out: ``cprop-adam+cosine`` is Adam, its updates scaled by CProp, under
cosine decay. Peers come from their own packages, so that none of them is weaker by our hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler

import cprop
from cprop.statistics import PREFIX
from cprop_lab import measures
from cprop_lab.schedule_free import ScheduleFreeCProp
from cprop_lab.specification import Setting, Specification

__all__ = [
    "CPROP_DEFAULTS",
    "KNOBS",
    "RECIPES",
    "Recipe",
    "build",
    "eager",
    "knobs",
    "label",
    "parse",
    "resolve_settings",
]

Build = Callable[..., Optimizer]

START: Final = "cprop_start"
"""After how many steps CProp begins to scale: the laboratory's own, see :class:`LateStart`."""
# Settings of CProp itself stand beside those of the optimizer it scales, as they do in the library's param groups.
CPROP_DEFAULTS: Final[Mapping[str, Setting]] = {
    "cprop_beta": 0.999,
    "cprop_c": 1.0,
    "cprop_eps": 1e-8,
    "cprop_measure": "normal",
    START: 0,
}
KNOBS: Final[Mapping[str, str]] = {"cprop_beta": "beta", "cprop_c": "c", START: "start"}
"""Settings of CProp that experiments vary, and what figures call them."""
EMA_DECAY: Final = 0.999


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is built, and where a search for its learning rate begins.

    Args:
        title: as figures name it.
        plain: builds it from parameters, ``lr`` and the settings.
        native: builds the native CProp optimizer that holds the same rule; without one, the wrapper is used.
        settings: defaults, written out: they are part of a run's identity.
        guess: where the search for the learning rate begins.
        alone: whether CProp cannot be put around it: it keeps other weights for training than for evaluation, and
            CProp would scale the way between them.
        scales: the optimizer whose steps this one scales by CProp in a rule of its own, if it does.
    """

    title: str
    plain: Build
    native: Build | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    guess: float = 1e-3
    alone: bool = False
    scales: str = ""


def _betas(build: Build) -> Build:
    """Settings are single values, so that a specification is plain; torch takes betas as a pair."""

    def with_betas(params: Any, beta1: float, beta2: float, **settings: Any) -> Optimizer:
        return build(params, betas=(beta1, beta2), **settings)

    return with_betas


def _from(package: str, name: str, **fixed: Any) -> Build:
    """A class of another package, imported when it is used."""

    def build(params: Any, **settings: Any) -> Optimizer:
        module = __import__(package)
        optimizer: Optimizer = getattr(module, name)(params, **fixed, **settings)
        return optimizer

    return build


ADAM: Final[Mapping[str, Setting]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
FUSED: Final[Mapping[str, Setting]] = {"fused": True}

# Settings of the paper's five: appendix B. The peers' are their packages' defaults; weight decay is off for all, as in
# the paper, so that training losses can be compared.
RECIPES: Final[Mapping[str, Recipe]] = {
    "sgd": Recipe("SGD", torch.optim.SGD, cprop.CPropSGD, FUSED, 0.1),
    "adam": Recipe("Adam", _betas(torch.optim.Adam), _betas(cprop.CPropAdam), {**ADAM, **FUSED}),
    "rmsprop": Recipe("RMSProp", torch.optim.RMSprop, cprop.CPropRMSprop, {"alpha": 0.99, "eps": 1e-8}),
    "amsgrad": Recipe(
        "AMSGrad",
        _betas(lambda params, **settings: torch.optim.Adam(params, amsgrad=True, **settings)),
        _betas(lambda params, **settings: cprop.CPropAdam(params, amsgrad=True, **settings)),
        {**ADAM, **FUSED},
    ),
    # "The convergence speed of the bound is determined by beta_2": gamma = 1 - beta_2.
    "adabound": Recipe(
        "AdaBound",
        _betas(_from("pytorch_optimizer", "AdaBound")),
        _betas(cprop.CPropAdaBound),
        {**ADAM, "final_lr": 0.1, "gamma": 1e-3},
    ),
    "adamw": Recipe(
        "AdamW",
        _betas(torch.optim.AdamW),
        _betas(cprop.CPropAdamW),
        {**ADAM, **FUSED, "weight_decay": 0.0},
    ),
    "schedule-free-adamw": Recipe(
        "Schedule-Free AdamW",
        _betas(_from("schedulefree", "AdamWScheduleFree")),
        settings={**ADAM, "weight_decay": 0.0, "warmup_steps": 0},
        guess=3e-3,
        alone=True,
    ),
    "schedule-free-cprop": Recipe(
        "Schedule-Free CProp",
        _betas(ScheduleFreeCProp),
        settings={**ADAM, "c": 4.0},
        guess=3e-3,
        alone=True,
        scales="schedule-free-adamw",
    ),
    # AdEMAMix without its slow average is AdamW (a test holds it to that), and the package applies caution to it.
    "cautious-adamw": Recipe(
        "Cautious AdamW",
        lambda params, beta1, beta2, **settings: _from("pytorch_optimizer", "AdEMAMix", alpha=0.0, cautious=True)(
            params, betas=(beta1, beta2, 0.9999), **settings
        ),
        settings={**ADAM, "weight_decay": 0.0},
    ),
    "prodigy": Recipe(
        "Prodigy",
        _betas(_from("pytorch_optimizer", "Prodigy")),
        settings={**ADAM, "weight_decay": 0.0},
        guess=1.0,
    ),
    "lion": Recipe(
        "Lion",
        _betas(_from("pytorch_optimizer", "Lion")),
        settings={"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
        guess=1e-4,
    ),
    "adabelief": Recipe(
        "AdaBelief",
        _betas(_from("pytorch_optimizer", "AdaBelief")),
        settings={**ADAM, "eps": 1e-16, "weight_decay": 0.0},
    ),
}


class Name(NamedTuple):
    """An optimizer's name, taken apart."""

    base: str
    cprop: bool = False
    cosine: bool = False
    ema: bool = False

    @property
    def recipe(self) -> Recipe:
        """How the optimizer inside is built."""
        return RECIPES[self.base]

    def __str__(self) -> str:
        return f"{'cprop-' * self.cprop}{self.base}{'+cosine' * self.cosine}{'+ema' * self.ema}"


def parse(name: str) -> Name:
    """Take a name apart.

    Raises:
        ValueError: if there is no such optimizer.

    Example:
        >>> parse("cprop-adam+cosine")
        Name(base='adam', cprop=True, cosine=True, ema=False)
    """
    match = re.fullmatch(r"(cprop-)?([a-z-]+?)(\+cosine)?(\+ema)?", name)
    if match is None or match[2] not in RECIPES:
        raise ValueError(
            f"unknown optimizer {name!r}: choose one of {', '.join(RECIPES)}, optionally with cprop- before it and "
            "+cosine, +ema or +cosine+ema after it"
        )
    if match[1] and RECIPES[match[2]].alone:
        raise ValueError(
            f"CProp cannot wrap {match[2]}, which keeps different weights for training and evaluation: compare another "
            "optimizer"
        )
    return Name(match[2], *(part is not None for part in (match[1], match[3], match[4])))


def label(specification: Specification) -> str:
    """As figures name it.

    Example:
        >>> label(Specification("fmnist-fc", "cprop-adam+ema", lr=1e-3, settings={"cprop_c": 3.0}))
        'CProp(Adam), c = 3, averaged'
    """
    name = parse(specification.optimizer)
    text = f"CProp({name.recipe.title})" if name.cprop else name.recipe.title
    measure = str(specification.settings.get("cprop_measure", "normal"))
    if measure != "normal":
        text = text.replace("CProp", measure.replace("_", " ").capitalize())
    turned = (
        f", {KNOBS[key]} = {value:g}" for key, value in knobs(specification).items() if value != CPROP_DEFAULTS[key]
    )
    return text + "".join(turned) + ", cosine" * name.cosine + ", averaged" * name.ema


def knobs(specification: Specification) -> dict[str, float]:
    """How the settings of CProp that experiments vary are set."""
    return {key: float(specification.settings.get(key, CPROP_DEFAULTS[key])) for key in KNOBS}


def resolve_settings(specification: Specification) -> dict[str, Setting]:
    """All settings of a run's optimizer, with the defaults that it did not name.

    Raises:
        ValueError: if it names a setting that the optimizer does not have.
    """
    name = parse(specification.optimizer)
    defaults = {**name.recipe.settings, **(CPROP_DEFAULTS if name.cprop else {})}
    if name.cprop and name.recipe.native is not None:
        defaults["fused"] = True
    unknown = set(specification.settings) - set(defaults)
    if unknown:
        raise ValueError(
            f"{specification.optimizer} has no setting {', '.join(sorted(unknown))}: it has {', '.join(defaults)}"
        )
    resolved = {**defaults, **specification.settings}
    if not resolved.get(START):
        # The usual start is no part of a run's identity: there were runs before there was another.
        resolved.pop(START, None)
    return resolved


def eager(specification: Specification) -> Specification:
    """The same run without compiled or fused steps, for machines that cannot compile."""
    if "fused" not in resolve_settings(specification):
        return specification
    return specification.but(settings={**specification.settings, "fused": False})


class LateStart(LRScheduler):
    """CProp watches for the first steps and scales from then on: until there its ``c`` is infinite, a scale of one.

    Args:
        optimizer: with CProp.
        steps: how many it watches.
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.steps = steps
        self.cs = [group["cprop_c"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Set ``c``, and leave the learning rate as it is."""
        for group, c in zip(self.optimizer.param_groups, self.cs, strict=True):
            group["cprop_c"] = math.inf if self.last_epoch < self.steps else c
        return [group["lr"] for group in self.optimizer.param_groups]


def build(specification: Specification, params: Iterable[nn.Parameter]) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer of a run, and its scheduler if it has one; cosine decay's horizon is the run's length."""
    name = parse(specification.optimizer)
    settings = resolve_settings(specification)
    start = int(settings.pop(START, 0))
    of_cprop: dict[str, Any] = {key: settings.pop(key) for key in CPROP_DEFAULTS if key in settings}
    if name.cprop:
        of_cprop["cprop_measure"] = measures.OWN.get(of_cprop["cprop_measure"], of_cprop["cprop_measure"])
    recipe = name.recipe
    if not name.cprop:
        optimizer = recipe.plain(params, lr=specification.lr, **settings)
    elif recipe.native is not None:
        optimizer = recipe.native(params, lr=specification.lr, **settings, **of_cprop)
    else:
        inner = recipe.plain(params, lr=specification.lr, **settings)
        optimizer = cprop.CProp(inner, **{key.removeprefix(PREFIX): value for key, value in of_cprop.items()})
    schedulers: list[LRScheduler] = []
    if start:
        schedulers.append(LateStart(optimizer, start))
    if name.cosine:
        schedulers.append(CosineAnnealingLR(optimizer, specification.iterations))
    return optimizer, ChainedScheduler(schedulers) if len(schedulers) > 1 else next(iter(schedulers), None)
