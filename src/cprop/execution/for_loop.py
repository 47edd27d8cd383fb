"""Rules as a for-loop over parameters: the reference implementation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from cprop.execution.job import Job, Row, as_vector, elements, in_one_order
from cprop.measures import is_built_in
from cprop.rules import Rule, apply
from cprop.storage import Draw

__all__ = ["run_for_loop"]


SLICE: Final = 1 << 17
"""Number of elements of a large CPU tensor that a rule is run on at a time, so that temporaries stay in the cache."""


def run_for_loop(rule: Rule, job: Job, flags: Any) -> None:
    """Run a rule as a for-loop over parameters: the reference implementation."""
    built_in = is_built_in(getattr(flags, "measure", flags)) and not torch.compiler.is_compiling()
    for row, seed in job.items():
        inputs = tuple(map(elements, row))
        flat = built_in and in_one_order(inputs)
        draw = job.draw(row, seed, flat)
        for part, of_part in slices(tuple(map(as_vector, inputs)), draw) if flat else ((inputs, draw),):
            apply(rule, dict(zip(job.names, part, strict=True)), job.scalars, flags, of_part)


def slices(row: Row, draw: Draw | None) -> Iterable[tuple[Row, Draw | None]]:
    """Vectors on the CPU in parts of ``SLICE`` elements, with the draw of each part; others as they are."""
    if row[0].numel() <= SLICE or row[0].device.type != "cpu":
        yield row, draw
        return
    for start in range(0, row[0].numel(), SLICE):
        yield tuple(x[start : start + SLICE] for x in row), draw and draw.part(start, SLICE)
