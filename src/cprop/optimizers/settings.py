"""CProp's settings in param groups, and the checks of all settings."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor

from cprop.arithmetic import Number
from cprop.measures import Measure, resolve_measure
from cprop.statistics import PREFIX
from cprop.storage import FORMATS

__all__ = [
    "BARE",
    "ROUNDING",
    "Settings",
    "arguments",
    "check_betas",
    "check_lr",
    "check_non_negative",
    "complete",
    "documented",
    "refuse_misnamed",
    "require",
    "settings_of",
]


class Settings(NamedTuple):
    """CProp's hyperparameters, stored in every param group."""

    cprop_beta: float = 0.999
    cprop_c: float = 1.0
    cprop_eps: float = 0.0
    cprop_measure: str | Measure = "normal"
    cprop_state_dtype: str = "float32"

    def check(self) -> Settings:
        """Return the settings, or raise an error that names the invalid one and the fix."""
        require(
            0.0 <= self.cprop_beta < 1.0,
            f"invalid cprop_beta {self.cprop_beta}: the horizon must be in [0, 1); 0.999 looks back about 1,000 steps",
        )
        require(
            self.cprop_c > 0.0,
            f"invalid cprop_c {self.cprop_c}: the overconfidence must be in (0, inf]; the paper uses 1, "
            "inf disables the scaling",
        )
        require(
            0.0 <= self.cprop_eps < math.inf,
            f"invalid cprop_eps {self.cprop_eps}: it must be in [0, inf); 0 makes the scale independent of the "
            "gradients' magnitude, the paper uses 1e-8",
        )
        require(
            self.cprop_state_dtype in FORMATS,
            f"invalid cprop_state_dtype {self.cprop_state_dtype!r}: choose one of {', '.join(map(repr, FORMATS))}",
        )
        resolve_measure(self.cprop_measure)
        return self


def settings_of(group: Mapping[str, Any]) -> Settings:
    """CProp's settings in a param group or in the defaults."""
    return Settings(*(group[name] for name in Settings._fields))


def require(condition: bool, message: str) -> None:
    """Raise a ``ValueError`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_lr(lr: Number) -> None:
    """Raise if a learning rate is negative or not a single number."""
    require(not isinstance(lr, Tensor) or lr.numel() == 1, "a tensor lr must have one element")
    require(bool(lr >= 0.0), f"invalid lr {lr}: the learning rate must be at least 0")


def check_non_negative(**values: float) -> None:
    """Raise if a hyperparameter is negative."""
    for name, value in values.items():
        require(value >= 0.0, f"invalid {name} {value}: it must be at least 0")


def check_betas(betas: tuple[Number, Number]) -> None:
    """Raise if an averaging coefficient is outside [0, 1)."""
    for index, beta in enumerate(betas):
        require(bool(0.0 <= beta < 1.0), f"invalid betas[{index}] {beta}: it must be in [0, 1)")


ROUNDING: Final = "cprop_stochastic_rounding"
"""Whether a native optimizer rounds bfloat16 parameters stochastically; the wrapper always does."""
SPECIFIC: Final = frozenset({ROUNDING, "cprop_foreach", "cprop_fused"})
"""Settings that only the native optimizers or only the wrapper have."""
BARE: Final = frozenset({"beta", "c", "measure", "state_dtype"})
"""CProp's settings without their prefix, if they mean nothing else."""

COMMON: Final = {
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    **Settings()._asdict(),
    ROUNDING: False,
}
"""Settings that all native optimizers have, with their defaults."""


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all native optimizers have, with defaults for those not given."""
    refuse_unknown(options, COMMON)
    return {**COMMON, **options}


def arguments(of_constructor: Mapping[str, Any]) -> dict[str, Any]:
    """A native optimizer's default settings, from the ``locals()`` of its constructor."""
    defaults = {name: of_constructor[name] for name in of_constructor if name not in ("self", "params", "__class__")}
    refuse_unknown(defaults.pop("unknown"), defaults)
    return defaults


def refuse_misnamed(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise if a param group has a setting of CProp under a wrong name, which would be ignored.

    Any other key may belong to another tool, such as a scheduler's ``initial_lr``.

    Args:
        group: the group, as it was given.
        known: the settings that exist, of the algorithm and of CProp.
    """
    own = sorted(name for name in known if name.startswith(PREFIX))
    for name in (name for name in group if isinstance(name, str) and name not in known):
        # A group of another class of this package may have its flags, but they must not be set.
        unset = name in SPECIFIC and not group[name]
        if name in BARE or (name.startswith(PREFIX) and not unset):
            meant = get_close_matches(PREFIX + name.removeprefix(PREFIX), own, n=1)
            instead = f"write {meant[0]}" if meant else f"choose from {', '.join(own)}"
            raise TypeError(f"unexpected setting {name!r} in a param group: {instead}")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise if an option does not exist, and name the one that was probably meant."""
    for name in sorted(set(options) - set(known)):
        instead = f"write {PREFIX}{name}" if PREFIX + name in known else f"choose from {', '.join(known)}"
        raise TypeError(f"unexpected keyword argument {name!r}: {instead}")


DESCRIPTIONS: Final = {
    "params": "parameters, named parameters, or param groups, as in torch.",
    "lr": r"learning rate :math:`\gamma`. CProp only scales down, so choose the one that reduces the loss fastest at "
    "the start (paper section 4.1).",
    "betas": "coefficients of Adam's running averages.",
    "maximize": "maximize the objective instead of minimizing it.",
    "foreach": "whether to use the foreach implementation; by default, as torch would choose.",
    "fused": "whether to use compiled kernels, one per parameter; they are compiled at the first step.",
    "capturable": "keep the step counters on the parameters' device, without host synchronization. Each parameter is "
    "then updated separately, even with ``foreach``, because equal step counts cannot be detected.",
    "cprop_beta": r"horizon :math:`\beta` of the statistics; 0.999 looks back about 1,000 steps.",
    "cprop_c": "overconfidence :math:`c`; infinity disables the scaling.",
    "cprop_eps": r":math:`\epsilon` of the standard error. It is absolute: the paper's 1e-8 slows down learning where "
    "gradients are below about 1e-6.",
    "cprop_measure": "the conformity measure; see :func:`cprop.conformity_scale`.",
    "cprop_state_dtype": 'storage format of the state: ``"float32"``, or ``"bfloat16"`` with stochastic rounding.',
    ROUNDING: "round bfloat16 parameters stochastically, so that small updates are not lost.",
}
"""What arguments mean that several optimizers have."""

T = TypeVar("T", bound=type)


def documented(cls: T) -> T:
    """A class whose docstring has, for a line ``{name, name}``, the arguments of these names with their descriptions.

    Example:
        >>> @documented
        ... class Descent:
        ...     '''Walks downhill.
        ...
        ...     Args:
        ...         {params, beta}
        ...     '''
        >>> print(Descent.__doc__.splitlines()[3].strip())
        params: parameters, named parameters, or param groups, as in torch.
    """

    def described(line: re.Match[str]) -> str:
        return "\n".join(entry(name, indent=line[1]) for name in line[2].split(", "))

    def entry(name: str, indent: str) -> str:
        text = f"{name}: {DESCRIPTIONS.get(name) or DESCRIPTIONS[PREFIX + name]}"
        return textwrap.fill(
            text, 120, initial_indent=indent, subsequent_indent=indent + " " * 4, break_on_hyphens=False
        )

    if cls.__doc__:  # python -OO has none
        cls.__doc__ = re.sub(r"(?m)^( *)\{([\w, ]+)\}$", described, cls.__doc__)
    return cls
