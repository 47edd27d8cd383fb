"""A run's id: a digest of everything that decides its numbers, the same in every process and on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cprop_lab import workloads
from cprop_lab.run.recipes import RECIPES, Setting
from cprop_lab.run.specification import NUMERICS, Specification

__all__ = ["digest", "resolve", "run_id"]


def resolve(specification: Specification) -> dict[str, Any]:
    """A specification with every default written out, and the version of the code: what a run's id is computed from."""
    settings = specification.resolved_settings()
    resolved = {
        **specification.replace(settings=settings).to_dict(),
        "numerics": NUMERICS,
        "code": workloads.code(specification.workload),
    }
    own = {name: code for name, code in _codes(specification, settings) if code}
    return {**resolved, "with": own} if own else resolved


def _codes(specification: Specification, settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    """What identifies an optimizer and a measure of your own."""
    base = specification.optimizer_name.base
    yield base, RECIPES.code(base)
    if measure := settings.get("cprop_measure", settings.get("measure")):
        from cprop_lab.run.measures import OWN  # imports torch, which readers of stored runs do not need

        yield str(measure), OWN.code(str(measure))


def digest(resolved: Mapping[str, Any]) -> str:
    """The id of a run with every default written out: sixteen hexadecimal digits."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:16]


def run_id(specification: Specification) -> str:
    """The id of a run."""
    return digest(resolve(specification))
