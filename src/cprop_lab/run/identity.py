"""A run's id: a digest of everything that decides its numbers, the same in every process and on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cprop_lab.run.specification import NUMERICS, Specification

__all__ = ["identify", "resolve"]


def resolve(specification: Specification) -> dict[str, Any]:
    """A specification with every default written out, and the version of the code: what a run's identity is made of."""
    from cprop_lab import workloads  # leads to torch, which readers of stored runs do without

    settings = specification.resolved_settings()
    return {
        **specification.but(settings=settings).to_dict(),
        "numerics": NUMERICS,
        "code": workloads.code(specification.workload),
    }


def identify(specification: Specification) -> str:
    """The name of a run: sixteen digits that follow from all that decides its numbers."""
    return hashlib.sha256(json.dumps(resolve(specification), sort_keys=True).encode()).hexdigest()[:16]
