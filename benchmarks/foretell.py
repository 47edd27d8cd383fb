"""Does a plain Adam run foretell what CProp saves? ``python -m benchmarks.foretell --data FOLDER``.

For every workload and batch size in ``evidence/`` with Adam or AdamW at a constant rate, with and without CProp: train
the first tenth of the plain run again, with CProp's statistics but without its scale, and note what a user could read
then. The saving comes from the committed runs. ``benchmarks.report`` correlates the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

import cprop
from benchmarks import EVIDENCE, ROOT
from cprop_lab.analysis.pairs import Pair, pairs
from cprop_lab.output import pages
from cprop_lab.run.names import CPROP_DEFAULTS
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training, arithmetic, commit

RESULTS = ROOT / "benchmarks" / "results" / "foretell.json"
PART = 10
"""One of so many parts of the plain run is looked at."""
LOST = math.erf(1 / math.sqrt(2))
"""The conformity of a mean that is as large as its standard error: below, it is lost in the noise."""
SEES_ALL = 1e30
"""An overconfidence at which CProp scales nothing, and its statistics are still kept."""


class Case(NamedTuple):
    """A workload and batch size."""

    name: str
    pair: Pair


def cases() -> Iterator[Case]:
    """Every pair of Adam or AdamW at CProp's defaults, once."""
    seen = set()
    for experiment in pages.kept(EVIDENCE).values():
        for pair in pairs(experiment.runs).values():
            plain, scaled = pair.plain[0].specification, pair.scaled[0].specification
            name = f"{plain.workload_label} {plain.optimizer}"
            usual = {key: scaled.settings.get(key, value) for key, value in CPROP_DEFAULTS.items()} == CPROP_DEFAULTS
            if plain.optimizer in ("adam", "adamw") and usual and plain.iterations >= 1_000 and name not in seen:
                seen.add(name)
                yield Case(name, pair)


def look(specification: Specification) -> dict[str, float]:
    """What a user could read after a tenth of a plain run."""
    seeing = {**specification.settings, "cprop_c": SEES_ALL, "fused": False}
    watched = specification.replace(optimizer=f"cprop-{specification.optimizer}", settings=seeing)
    with arithmetic():
        training = Training(watched)
        training.advance(specification.iterations // PART)
    optimizer: Any = training.optimizer
    for group in optimizer.param_groups:
        group["cprop_c"] = 1.0
    monitor = cprop.Monitor(optimizer, training.model.named_parameters(), batch_size=specification.batch_size)
    total = monitor.sample().total
    scales = torch.cat([scale.flatten() for _, scale in optimizer.scales()])
    return {
        "conformity": total.conformity,
        "lost": (scales < LOST).float().mean().item(),
        "noise_to_batch": 1 / total.signal_to_noise if total.signal_to_noise > 0 else math.inf,
    }


def main() -> None:
    """Look at every case, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.data:
        os.environ["CPROP_LAB_DATA"] = str(options.data.absolute())
    found = []
    for case in track(list(cases()), "looking"):
        plain = case.pair.plain[0].specification
        found.append({"name": case.name, **look(plain), "iterations": plain.iterations})
    RESULTS.write_text(json.dumps({"part": PART, "commit": commit(), "cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
