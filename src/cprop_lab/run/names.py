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

__all__ = [
    "AVERAGES",
    "CPROP_DEFAULTS",
    "FLAGS",
    "FUSED_WRAPPER",
    "KNOBS",
    "PAPERS_EPS",
    "RECIPES",
    "SCHEDULES",
    "START",
    "OptimizerName",
    "Recipe",
    "Setting",
    "parse",
]

Setting = bool | int | float | str
Build = Callable[..., "Optimizer"]

START: Final = "cprop_start"
"""After how many steps CProp starts to scale: a setting of the laboratory, see ``optimizers.LateStart``."""


FUSED_WRAPPER: Final = "cprop_fused"
"""Whether the wrapper's part of a step is compiled, as ``fused`` is for a native optimizer."""
FLAGS: Final = ("fused", FUSED_WRAPPER)
"""How steps are executed, which changes results by rounding alone."""


# Settings of CProp itself stand beside those of the optimizer it scales, as they do in the library's param groups.
CPROP_DEFAULTS: Final[Mapping[str, Setting]] = {
    "cprop_beta": 0.999,
    "cprop_c": 1.0,
    "cprop_eps": 0.0,
    "cprop_measure": "normal",
    START: 0,
}
"""Those of the library: what a run has that does not say otherwise, such as one of a task of your own."""


PAPERS_EPS: Final = 1e-8
"""The paper's ``cprop_eps``. It was also the library's default; experiments from then name it and keep their runs."""


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
        matrices: whether it treats hidden matrices differently, and takes them as a group of their own.
        warmup: the setting with which it warms up by itself, if it does; the others get a scheduler.
        horizon: the setting that must be told the run's length, if there is one.
    """

    title: str
    plain: Build
    native: Build | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    guess: float = 1e-3
    alone: bool = False
    scales: str = ""
    matrices: bool = False
    warmup: str = ""
    horizon: str = ""


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


DECAY: Final[Mapping[str, Setting]] = {"weight_decay": 0.0}


GPA: Final = _betas(_from("cprop_lab.run.averaging", "GPA"))
PRIMAL: Final[Mapping[str, Setting]] = {**ADAM, **DECAY, "mu_x": 0.9967, "mu_y": 0.7, "window": 0.0}


# Settings of the paper's five: appendix B. The peers' are their authors' defaults; weight decay is off for all, as in
# the paper, unless a run sets it.
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
        {**ADAM, **FUSED, **DECAY},
    ),
    "schedule-free-adamw": Recipe(
        "Schedule-Free AdamW",
        _betas(_from("schedulefree", "AdamWScheduleFree")),
        settings={**ADAM, **DECAY, "warmup_steps": 0},
        guess=3e-3,
        alone=True,
        warmup="warmup_steps",
    ),
    "schedule-free-cprop": Recipe(
        "Schedule-Free CProp",
        _betas(_from("cprop_lab.run.averaging", "ScheduleFreeCProp")),
        settings={**ADAM, "c": 4.0},
        guess=3e-3,
        alone=True,
        scales="schedule-free-adamw",
    ),
    "gpa-adamw": Recipe("GPA AdamW", GPA, settings=PRIMAL, alone=True),
    "gpa-cprop": Recipe(
        "GPA CProp", GPA, settings={**PRIMAL, "c": 1.0, "measure": "normal"}, alone=True, scales="gpa-adamw"
    ),
    "gpa-muon": Recipe("GPA Muon", GPA, settings=PRIMAL, guess=3e-3, alone=True, matrices=True),
    "gpa-cprop-muon": Recipe(
        "GPA CProp Muon",
        GPA,
        settings={**PRIMAL, "c": 1.0, "measure": "normal"},
        guess=3e-3,
        alone=True,
        scales="gpa-muon",
        matrices=True,
    ),
    "nadamw": Recipe(
        "NAdamW",
        _betas(_from("torch.optim", "NAdam", decoupled_weight_decay=True)),
        settings={**ADAM, **DECAY},
    ),
    "cautious-adamw": Recipe(
        "Cautious AdamW", _betas(_from("cprop_lab.run.peers", "CautiousAdamW")), settings={**ADAM, **DECAY}
    ),
    **{
        title.lower(): Recipe(
            title,
            _betas(_from("cprop_lab.run.peers", name)),
            settings={"momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, **DECAY, **more},
            guess=3e-3,
            matrices=True,
        )
        for title, name, more in (
            ("Muon", "Muon", {}),
            ("Muon-VS", "MuonVS", {}),
            ("Muon-SNR", "MuonSNR", {"noise": 1.0}),
        )
    },
    # The package preconditions up to 10,000 rows or columns: for Penn Treebank's 10,000 words that would be the
    # eigenvectors of a matrix of a hundred million elements.
    "soap": Recipe(
        "SOAP",
        _betas(_from("pytorch_optimizer", "SOAP", max_precondition_dim=1024)),
        settings={"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, **DECAY},
        guess=3e-3,
    ),
    "ademamix": Recipe(
        "AdEMAMix",
        lambda params, beta1, beta2, beta3, **settings: _from("pytorch_optimizer", "AdEMAMix", weight_decouple=True)(
            params, betas=(beta1, beta2, beta3), **settings
        ),
        settings={**ADAM, "beta3": 0.9999, "alpha": 5.0, **DECAY, "t_alpha_beta3": 0},
        horizon="t_alpha_beta3",
    ),
    "prodigy": Recipe(
        "Prodigy",
        _betas(_from("pytorch_optimizer", "Prodigy")),
        settings={**ADAM, **DECAY},
        guess=1.0,
    ),
    "lion": Recipe(
        "Lion",
        _betas(_from("pytorch_optimizer", "Lion")),
        settings={"beta1": 0.9, "beta2": 0.99, **DECAY},
        guess=1e-4,
    ),
    "adabelief": Recipe(
        "AdaBelief",
        _betas(_from("pytorch_optimizer", "AdaBelief")),
        settings={**ADAM, "eps": 1e-16, **DECAY},
    ),
}


SCHEDULES: Final[Mapping[str, str]] = {
    "cosine": "cosine",
    "wsd": "stable, then decay",
    "rsqrt": "inverse square root",
    "inverse": "inverse time",
}
"""What may decay the learning rate, and what figures call it; see ``optimizers.factor``."""

AVERAGES: Final[Mapping[str, str]] = {"ema": "averaged", "average": "averaged"}
"""Which average of the weights may be evaluated, and what figures call it; see ``optimizers.average``."""


@dataclass(frozen=True)
class OptimizerName:
    """An optimizer's name, taken apart."""

    base: str
    cprop: bool = False
    schedule: str = ""
    average: str = ""

    @cached_property
    def recipe(self) -> Recipe:
        """How the optimizer inside is built."""
        return RECIPES[self.base]

    @cached_property
    def tuned(self) -> str:
        """The name whose learning rate it uses: neither CProp nor averaged weights have one of their own."""
        return self.base + f"+{self.schedule}" * bool(self.schedule)

    @cached_property
    def plain(self) -> str:
        """The name without CProp."""
        return self.tuned + f"+{self.average}" * bool(self.average)

    @cached_property
    def knows_horizon(self) -> bool:
        """Whether its steps depend on how long the run will be."""
        return self.schedule in ("cosine", "wsd") or bool(self.recipe.horizon)


@cache
def parse(name: str) -> OptimizerName:
    """Take a name apart.

    Raises:
        ValueError: if there is no such optimizer.

    Example:
        >>> parse("cprop-adam+cosine")
        OptimizerName(base='adam', cprop=True, schedule='cosine', average='')
    """
    schedules, averages = "|".join(SCHEDULES), "|".join(AVERAGES)
    match = re.fullmatch(rf"(cprop-)?([a-z-]+?)(?:\+({schedules}))?(?:\+({averages}))?", name)
    if match is None or match[2] not in RECIPES:
        raise ValueError(
            f"unknown optimizer {name!r}: choose one of {', '.join(RECIPES)}, optionally with cprop- before it, and "
            "after it +cosine, +wsd, +rsqrt or +inverse for a schedule and +average for averaged weights"
        )
    if match[1] and RECIPES[match[2]].alone:
        raise ValueError(
            f"CProp cannot wrap {match[2]}, which keeps different weights for training and evaluation: compare another "
            "optimizer"
        )
    return OptimizerName(match[2], match[1] is not None, match[3] or "", match[4] or "")
