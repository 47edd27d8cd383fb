"""Does a plain Adam run foretell what CProp saves? ``python -m evidence.foretell --data FOLDER``.

For every workload and batch size in ``evidence/`` with Adam or AdamW at a constant rate, with and without CProp: train
the first tenth of the plain run again, with CProp's statistics but without its scale, and note what a user could read
then. The saving comes from the committed runs. ``evidence.report`` correlates the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from rich.progress import track
from scipy.stats import rankdata, spearmanr

import cprop
from cprop_lab.analysis.pairs import Pair, pairs
from cprop_lab.analysis.scoreboard import scores
from cprop_lab.output.tables import Table
from cprop_lab.run.names import CPROP_DEFAULTS, PAPERS_EPS
from cprop_lab.run.provenance import commit
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training, arithmetic
from evidence import EVIDENCE, pages

RESULTS = EVIDENCE / "results" / "foretell.json"
PART = 10
"""One of so many parts of the plain run is looked at."""
LOST = math.erf(1 / math.sqrt(2))
"""The conformity of a mean that is as large as its standard error: below, it is lost in the noise."""
ROWS = ("AdamW", "CProp(AdamW)")
"""Of a scoreboard."""
USUAL = {**CPROP_DEFAULTS, "cprop_eps": PAPERS_EPS}
"""CProp's settings in the committed runs, where an experiment does not vary them."""
RESAMPLES = 1_000
"""For an interval."""
SEES_ALL = 1e30
"""An overconfidence at which CProp scales nothing, and its statistics are still kept."""


def cases() -> dict[str, Pair]:
    """By workload and batch size, Adam or AdamW with CProp's defaults; the pair with the most seeds."""
    found: dict[str, Pair] = {}
    for experiment in pages.kept(EVIDENCE).values():
        # A scoreboard has runs of CProp at several rates: of these, the row with AdamW's.
        rows = {entry.name: entry.runs for entry in scores(*experiment)}
        of_rows = [Pair.over_common_seeds(*(rows[name] for name in ROWS))] if rows.keys() >= set(ROWS) else []
        for pair in of_rows or pairs(experiment.runs).values():
            plain, scaled = pair.plain[0].specification, pair.scaled[0].specification
            usual = {key: scaled.settings.get(key, value) for key, value in USUAL.items()} == USUAL
            if plain.optimizer in ("adam", "adamw") and usual and plain.iterations >= 1_000:
                before = found.get(plain.workload_label)
                if before is None or len(pair.plain) > len(before.plain):
                    found[plain.workload_label] = pair
    return found


def look(specification: Specification) -> dict[str, float]:
    """What a user could read after a tenth of a plain run."""
    seeing = {**specification.settings, "cprop_c": SEES_ALL, "cprop_eps": PAPERS_EPS, "fused": False}
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
        "signal_to_noise": total.signal_to_noise,
    }


SIGNS: Final = {
    "conformity": "mean conformity",
    "lost": "parameters lost in noise",
    "noise_to_batch": "noise scale / batch size",
    "steps": "steps so far",
}
"""What may foretell the saving, and how the page calls it. The last is the control: it says nothing about gradients."""
SAME: Final = "fmnist-cnn"
"""A workload with several cases of the same length."""


Case = dict[str, float]


def seen() -> dict[str, Case]:
    """By case, the signs, and how many iterations CProp takes as a part of the plain run's: the median over seeds."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    both = {}
    for name, pair in cases().items():
        run = pair.plain[0]
        if found.get(name, {}).get("run") == run.run_id:  # not a pair that was committed later
            signal = found[name]["signal_to_noise"]
            both[name] = {
                **found[name],
                "noise_to_batch": 1 / signal if signal else math.inf,
                "steps": run.specification.iterations // PART,
                "part": median(pair.shares("iterations")),
            }
    return dict(sorted(both.items(), key=lambda item: item[1]["part"]))


def correlations(among: Sequence[Case]) -> dict[str, tuple[float, float, float]]:
    """Of every sign that differs among the cases with what CProp takes; see :func:`correlation`."""
    return {
        sign: correlation([case[sign] for case in among], [case["part"] for case in among])
        for sign in SIGNS
        if len({case[sign] for case in among}) > 1
    }


def report() -> str:
    """What was seen, what CProp saved, and how the two are correlated."""
    by_name = seen()
    alone = [case for name, case in by_name.items() if name.startswith(SAME)]
    rows = [
        [name, *(_text(case[sign]) for sign in SIGNS), _text(case["part"], ".2f", "not reached")]
        for name, case in by_name.items()
    ]
    table = Table(["plain Adam", *SIGNS.values(), "iterations with CProp"], rows).markdown()
    everywhere, there = (
        "; ".join(
            f"{SIGNS[sign]}: {found:.2f} ({low:.2f} to {high:.2f})"
            for sign, (found, low, high) in correlations(among).items()
        )
        for among in (list(by_name.values()), alone)
    )
    return (
        f"{table}\n\nRank correlation with the iterations, and its 95 % interval, over all {len(by_name)} cases: "
        f"{everywhere}. Over the {len(alone)} of the convolutional network alone: {there}."
    )


def _text(value: float, form: str = ".3g", infinite: str = "no signal") -> str:
    if not math.isfinite(value):
        return infinite
    return f"{value:,}" if isinstance(value, int) else f"{value:{form}}"


def correlation(signs: Sequence[float], parts: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's rank correlation, and its 95 % interval by resampling the cases.

    Example:
        >>> [round(x, 2) for x in correlation([1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, math.inf])]
        [1.0, 1.0, 1.0]
    """
    both = np.array([rankdata(signs), rankdata(parts)])
    draws = np.random.default_rng(0).integers(len(signs), size=(RESAMPLES, len(signs)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one case alone, drawn every time, has no correlation
        found = [spearmanr(*both[:, draw]).statistic for draw in draws]
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(spearmanr(*both).statistic), float(low), float(high)


def main() -> None:
    """Look at every case that was not looked at yet, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.data:
        os.environ["CPROP_LAB_DATA"] = str(options.data.absolute())
    at = commit()  # of the code that looks, whatever is committed meanwhile
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs = {name: pair.plain[0] for name, pair in cases().items()}
    missing = [name for name, run in runs.items() if found.get(name, {}).get("run") != run.run_id]
    for name in track(missing, "looking"):
        found[name] = {"run": runs[name].run_id, **look(runs[name].specification), "commit": at}
        RESULTS.write_text(json.dumps({name: found[name] for name in runs if name in found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
