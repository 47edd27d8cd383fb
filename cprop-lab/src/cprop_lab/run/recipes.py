"""What optimizers, schedules and averages of the weights there are, by name: the paper's five, today's peers, your own.

Peers come from their own packages, so that none is weaker because of us. Nothing here imports torch: whoever reads
results needs names, not optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cprop_lab.registry import Registry, lazy

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "ADAM",
    "AVERAGES",
    "DECAY",
    "MUON",
    "PRIMAL",
    "RECIPES",
    "SCHEDULES",
    "Build",
    "Recipe",
    "Setting",
    "pair_of_betas",
    "register_optimizer",
]

Setting = bool | int | float | str
Build = Callable[..., "Optimizer"]


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is built, and where the search for its learning rate starts.

    Args:
        title: in figures and tables.
        plain: builds it from parameters, ``lr`` and the settings.
        native: builds the native CProp optimizer with the same rule; without one, the wrapper is used.
        settings: defaults, written out: they are part of a run's id.
        guess: where the search for the learning rate starts.
        alone: whether CProp may not wrap it; it cannot wrap one that trains and evaluates different weights, since it
            would scale the difference between them.
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


def pair_of_betas(build: Build) -> Build:
    """Settings are single values, so that a specification is plain; torch takes betas as a pair."""

    def with_betas(params: Any, beta1: float, beta2: float, **settings: Any) -> Optimizer:
        return build(params, betas=(beta1, beta2), **settings)

    return with_betas


ADAM: Final[Mapping[str, Setting]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


FUSED: Final[Mapping[str, Setting]] = {"fused": True}


DECAY: Final[Mapping[str, Setting]] = {"weight_decay": 0.0}


MUON: Final[Mapping[str, Setting]] = {"momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, **DECAY}


PRIMAL: Final[Mapping[str, Setting]] = {**ADAM, **DECAY, "mu_x": 0.9967, "mu_y": 0.7, "window": 0.0}


# Settings of the paper's five: appendix B. The peers' are their authors' defaults; weight decay is off for all, as in
# the paper, unless a run sets it.
_OWN: Final[dict[str, Recipe]] = {
    "sgd": Recipe("SGD", lazy("torch.optim", "SGD"), lazy("cprop", "CPropSGD"), FUSED, 0.1),
    "adam": Recipe(
        "Adam", pair_of_betas(lazy("torch.optim", "Adam")), pair_of_betas(lazy("cprop", "CPropAdam")), {**ADAM, **FUSED}
    ),
    "rmsprop": Recipe(
        "RMSProp", lazy("torch.optim", "RMSprop"), lazy("cprop", "CPropRMSprop"), {"alpha": 0.99, "eps": 1e-8}
    ),
    "amsgrad": Recipe(
        "AMSGrad",
        pair_of_betas(lazy("torch.optim", "Adam", amsgrad=True)),
        pair_of_betas(lazy("cprop", "CPropAdam", amsgrad=True)),
        {**ADAM, **FUSED},
    ),
    # "The convergence speed of the bound is determined by beta_2": gamma = 1 - beta_2.
    "adabound": Recipe(
        "AdaBound",
        pair_of_betas(lazy("pytorch_optimizer", "AdaBound")),
        pair_of_betas(lazy("cprop", "CPropAdaBound")),
        {**ADAM, "final_lr": 0.1, "gamma": 1e-3},
    ),
    "adamw": Recipe(
        "AdamW",
        pair_of_betas(lazy("torch.optim", "AdamW")),
        pair_of_betas(lazy("cprop", "CPropAdamW")),
        {**ADAM, **FUSED, **DECAY},
    ),
    "schedule-free-adamw": Recipe(
        "Schedule-Free AdamW",
        pair_of_betas(lazy("schedulefree", "AdamWScheduleFree")),
        settings={**ADAM, **DECAY, "warmup_steps": 0},
        guess=3e-3,
        alone=True,
        warmup="warmup_steps",
    ),
    "gpa-adamw": Recipe(
        "GPA AdamW", pair_of_betas(lazy("cprop_lab.run.averaging", "GPA")), settings=PRIMAL, alone=True
    ),
    "nadamw": Recipe(
        "NAdamW",
        pair_of_betas(lazy("torch.optim", "NAdam", decoupled_weight_decay=True)),
        settings={**ADAM, **DECAY},
    ),
    "cautious-adamw": Recipe(
        "Cautious AdamW", pair_of_betas(lazy("cprop_lab.run.peers", "CautiousAdamW")), settings={**ADAM, **DECAY}
    ),
    "muon": Recipe(
        "Muon",
        pair_of_betas(lazy("cprop_lab.run.peers", "Muon")),
        settings=MUON,
        guess=3e-3,
        matrices=True,
    ),
    # The package preconditions up to 10,000 rows or columns: for Penn Treebank's 10,000 words that would be the
    # eigenvectors of a matrix of a hundred million elements.
    "soap": Recipe(
        "SOAP",
        pair_of_betas(lazy("pytorch_optimizer", "SOAP", max_precondition_dim=1024)),
        settings={"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, **DECAY},
        guess=3e-3,
    ),
    "ademamix": Recipe(
        "AdEMAMix",
        lambda params, beta1, beta2, beta3, **settings: lazy("pytorch_optimizer", "AdEMAMix", weight_decouple=True)(
            params, betas=(beta1, beta2, beta3), **settings
        ),
        settings={**ADAM, "beta3": 0.9999, "alpha": 5.0, **DECAY, "t_alpha_beta3": 0},
        horizon="t_alpha_beta3",
    ),
    "prodigy": Recipe(
        "Prodigy",
        pair_of_betas(lazy("pytorch_optimizer", "Prodigy")),
        settings={**ADAM, **DECAY},
        guess=1.0,
    ),
    "lion": Recipe(
        "Lion",
        pair_of_betas(lazy("pytorch_optimizer", "Lion")),
        settings={"beta1": 0.9, "beta2": 0.99, **DECAY},
        guess=1e-4,
    ),
    "adabelief": Recipe(
        "AdaBelief",
        pair_of_betas(lazy("pytorch_optimizer", "AdaBelief")),
        settings={**ADAM, "eps": 1e-16, **DECAY},
    ),
}


RECIPES: Final = Registry("optimizer", _OWN)
"""All optimizers: the laboratory's own, and those that modules of your own register."""


def register_optimizer(name: str, recipe: Recipe, version: str | None = None) -> None:
    """Add an optimizer of your own, for all commands that are given your module as ``--with MODULE``.

    Args:
        name: on the command line: lower-case letters, digits and hyphens.
        recipe: how it is built, and what its settings are.
        version: what identifies it in a run's id; by default a digest of your module's source, so that an optimizer
            that was changed is run again.

    Raises:
        ValueError: if the name is taken, or could be read in two ways.

    Example:
        >>> import torch
        >>> register_optimizer("asgd", Recipe("ASGD", torch.optim.ASGD, settings={"lambd": 1e-4}), version="1")
    """
    if name.startswith("cprop-") or "_" in name:
        raise ValueError(f"{name!r} cannot be the name of an optimizer: use hyphens, and do not begin with cprop-")
    RECIPES.add(name, recipe, version, above=2)


SCHEDULES: Final[Mapping[str, str]] = {
    "cosine": "cosine",
    "wsd": "stable, then decay",
    "rsqrt": "inverse square root",
    "inverse": "inverse time",
}
"""What may decay the learning rate, and what figures call it; see ``optimizers.factor``."""

AVERAGES: Final[Mapping[str, str]] = {"ema": "averaged", "average": "averaged"}
"""Which average of the weights may be evaluated, and what figures call it; see ``optimizers.average``."""
