"""The optimizers that are compared, by name: the paper's five, today's peers, and CProp around each of them.

A name is read from the inside out: ``cprop-adam+cosine`` is Adam, its updates scaled by CProp, under
cosine decay. Peers come from their own packages, so that none is weaker because of us.

Nothing here imports torch: whoever reads results needs names, not optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["CPROP_DEFAULTS", "KNOBS", "RECIPES", "START", "OptimizerName", "Recipe", "Setting", "parse"]

Setting = bool | int | float | str
Build = Callable[..., "Optimizer"]

START: Final = "cprop_start"
"""After how many steps CProp starts to scale: a setting of the laboratory, see ``optimizers.LateStart``."""


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


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is built, and where the search for its learning rate starts.

    Args:
        title: in figures and tables.
        plain: builds it from parameters, ``lr`` and the settings.
        native: builds the native CProp optimizer with the same rule; without one, the wrapper is used.
        settings: defaults, written out: they are part of a run's id.
        guess: where the search for the learning rate starts.
        alone: whether CProp cannot wrap it: it trains and evaluates different weights, and CProp would scale the
            difference between them.
        scales: the optimizer whose steps this one scales by CProp in its own rule, if it does.
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


def _from(module: str, name: str, **fixed: Any) -> Build:
    """A class, imported when it is used."""

    def build(params: Any, **settings: Any) -> Optimizer:
        optimizer: Optimizer = getattr(import_module(module), name)(params, **fixed, **settings)
        return optimizer

    return build


ADAM: Final[Mapping[str, Setting]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


FUSED: Final[Mapping[str, Setting]] = {"fused": True}


# Settings of the paper's five: appendix B. The peers' are their packages' defaults; weight decay is off for all, as in
# the paper, so that training losses can be compared.
RECIPES: Final[Mapping[str, Recipe]] = {
    "sgd": Recipe("SGD", _from("torch.optim", "SGD"), _from("cprop", "CPropSGD"), FUSED, 0.1),
    "adam": Recipe(
        "Adam", _betas(_from("torch.optim", "Adam")), _betas(_from("cprop", "CPropAdam")), {**ADAM, **FUSED}
    ),
    "rmsprop": Recipe(
        "RMSProp", _from("torch.optim", "RMSprop"), _from("cprop", "CPropRMSprop"), {"alpha": 0.99, "eps": 1e-8}
    ),
    "amsgrad": Recipe(
        "AMSGrad",
        _betas(_from("torch.optim", "Adam", amsgrad=True)),
        _betas(_from("cprop", "CPropAdam", amsgrad=True)),
        {**ADAM, **FUSED},
    ),
    # "The convergence speed of the bound is determined by beta_2": gamma = 1 - beta_2.
    "adabound": Recipe(
        "AdaBound",
        _betas(_from("pytorch_optimizer", "AdaBound")),
        _betas(_from("cprop", "CPropAdaBound")),
        {**ADAM, "final_lr": 0.1, "gamma": 1e-3},
    ),
    "adamw": Recipe(
        "AdamW",
        _betas(_from("torch.optim", "AdamW")),
        _betas(_from("cprop", "CPropAdamW")),
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
        _betas(_from("cprop_lab.run.schedule_free", "ScheduleFreeCProp")),
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


@dataclass(frozen=True)
class OptimizerName:
    """An optimizer's name, taken apart."""

    base: str
    cprop: bool = False
    cosine: bool = False
    ema: bool = False

    @cached_property
    def recipe(self) -> Recipe:
        """How the optimizer inside is built."""
        return RECIPES[self.base]

    @cached_property
    def tuned(self) -> str:
        """The name whose learning rate it uses: neither CProp nor averaged weights have one of their own."""
        return f"{self.base}{'+cosine' * self.cosine}"

    @cached_property
    def plain(self) -> str:
        """The name without CProp."""
        return f"{self.tuned}{'+ema' * self.ema}"


@cache
def parse(name: str) -> OptimizerName:
    """Take a name apart.

    Raises:
        ValueError: if there is no such optimizer.

    Example:
        >>> parse("cprop-adam+cosine")
        OptimizerName(base='adam', cprop=True, cosine=True, ema=False)
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
    return OptimizerName(match[2], *(part is not None for part in (match[1], match[3], match[4])))
