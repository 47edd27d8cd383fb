"""One page on all experiments: what the paper claims, what was measured, and how; and beside it, tables of all runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from cprop_lab.analysis.curves import WINDOW
from cprop_lab.analysis.pairs import pairs_of
from cprop_lab.analysis.scoreboard import scores
from cprop_lab.analysis.spread import NOTHING
from cprop_lab.analysis.verdict import verdict
from cprop_lab.output import tables
from cprop_lab.output.drawing import to_svg
from cprop_lab.output.figures import draw, preset
from cprop_lab.store import Manifest, Run, Store
from cprop_lab.store.builds import mixed

__all__ = ["write"]

SHOWN: Final = 20
"""Seeds or missing runs that are named."""

TEMPLATES: Final = Environment(
    loader=PackageLoader("cprop_lab.output"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write(store: Store, path: Path) -> None:
    """Write a page on all experiments of a store, as one file that fetches nothing.

    The runs of each experiment are listed in a folder beside it: there may be a hundred thousand.

    Args:
        store: holds the experiments.
        path: the file to write; ``report.html`` has its tables in ``report-runs``.
    """
    lists = path.with_name(f"{path.stem}-runs")
    lists.mkdir(parents=True, exist_ok=True)
    experiments = [
        _section(name, manifest, store.runs(manifest["runs"]), store.runs(manifest.get("timings", ())), lists)
        for name, manifest in store.experiments().items()
    ]
    page = TEMPLATES.get_template("page.html").render(experiments=experiments, window=WINDOW)
    path.write_text(page, encoding="utf-8")


def _section(name: str, manifest: Manifest, runs: Sequence[Run], timings: Sequence[Run], lists: Path) -> dict[str, Any]:
    """What the template shows of an experiment; what is empty is left out."""
    anchor = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    drawn = draw(manifest, runs, timings, titled=False)
    present = {run.run_id for run in runs}
    missing = [run for run in manifest["runs"] if run not in present]
    entries, found = scores(manifest, runs, timings), pairs_of(manifest, runs)
    verdicts = [verdict(name, pair) for name, pair in found.items()]
    if runs:
        tables.all_runs(runs).csv(lists / f"{anchor}.csv")
    return {
        "anchor": anchor,
        "manifest": manifest,
        "missing": len(missing),
        "first_missing": _first(missing),
        "mixed": mixed([*runs, *timings]),
        "figures": {suffix: _inline(figure, f"{anchor}{suffix}") for suffix, figure in drawn.items()},
        "scores": tables.scoreboard(entries) if entries else None,
        "verdicts": verdicts,
        "notes": list(dict.fromkeys(note for one in verdicts for note in one.notes)),
        "times": tables.times_to_target(found),
        "all_reached": all(math.isfinite(share) for pair in found.values() for share in pair.shares("iterations")),
        "final_values": tables.final_values(runs) if runs else None,
        "provenance": _provenance(manifest, runs),
        "runs": f"{lists.name}/{anchor}.csv" if runs else None,
    }


def _inline(figure: Figure, name: str) -> Markup:
    """A figure as part of the page. Ids must be unique on a page, so the figure's name is put before its own."""
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", to_svg(figure))
    return Markup(re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2))  # a page knows what svg is


def _first(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN:,} more" * (len(names) > SHOWN)


def _provenance(manifest: Manifest, runs: Sequence[Run]) -> dict[str, str]:
    """How an experiment was made."""

    def made(*keys: str) -> str:
        """The distinct values that the runs have there."""
        found = (" ".join(str(run.provenance.get(key, "")) for key in keys).strip() for run in runs)
        return ", ".join(sorted(set(filter(None, found)))) or NOTHING

    dates = sorted(str(run.provenance["finished"]) for run in runs if "finished" in run.provenance)
    return {
        "preset": preset(manifest),
        "learning rates": ", ".join(f"{name}: {lr:g}" for name, lr in manifest["learning_rates"].items()) or NOTHING,
        "seeds": _first([str(seed) for seed in sorted({run.specification.seed for run in runs})]) or NOTHING,
        "commit": made("commit"),
        "cprop": made("cprop"),
        "torch": made("torch"),
        "python": made("python"),
        "device": made("device", "machine"),
        "threads per run": made("threads"),
        "finished": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NOTHING,
    }
