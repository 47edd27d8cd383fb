"""An optimizer's name, taken apart.

It is read from the inside out: ``cprop-adam+cosine`` is Adam, its updates scaled by CProp, under cosine decay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from cprop_lab.run.recipes import AVERAGES, RECIPES, SCHEDULES, Recipe, Setting

__all__ = [
    "CPROP_DEFAULTS",
    "FLAGS",
    "FUSED_WRAPPER",
    "KNOBS",
    "LATER",
    "PAPERS_EPS",
    "START",
    "STATE",
    "OptimizerName",
    "parse",
]

STATE: Final = "cprop_state_dtype"
"""How the optimizer's state is stored."""

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
    STATE: "float32",
}
"""Those of the library: what a run has that does not say otherwise, such as one of a task of your own."""

PAPERS_EPS: Final = 1e-8
"""The paper's ``cprop_eps``. It was also the library's default; experiments from then name it and keep their runs."""

LATER: Final = (START, STATE)
"""Of these, a default is not part of a run's id: there were runs before they were settings."""


KNOBS: Final[Mapping[str, str]] = {"cprop_beta": "beta", "cprop_c": "c", START: "start"}
"""Settings of CProp that experiments vary, and what figures call them."""


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
    match = re.fullmatch(rf"(cprop-)?([a-z0-9-]+?)(?:\+({schedules}))?(?:\+({averages}))?", name)
    if match is None or match[2] not in RECIPES:
        raise ValueError(
            f"unknown optimizer {name!r}: choose one of {', '.join(RECIPES)}, or one of a module of your own that is "
            "given as --with MODULE; optionally with cprop- before it, and after it +cosine, +wsd, +rsqrt or +inverse "
            "for a schedule and +average for averaged weights"
        )
    if match[1] and RECIPES[match[2]].alone:
        raise ValueError(
            f"CProp cannot wrap {match[2]}, which keeps different weights for training and evaluation: compare another "
            "optimizer"
        )
    return OptimizerName(match[2], match[1] is not None, match[3] or "", match[4] or "")
