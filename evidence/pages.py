"""Tables and figures of stored experiments, for pages in Markdown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import research  # noqa: F401  # its optimizers are among those of the runs
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cprop_lab.analysis import scoreboard
from cprop_lab.analysis.curves import ended, final_loss
from cprop_lab.analysis.groups import WORDS, grouped, judged_by, names
from cprop_lab.analysis.pairs import outcome, pairs
from cprop_lab.analysis.scoreboard import Entry, scores
from cprop_lab.analysis.spread import as_measured, shown
from cprop_lab.output.drawing import save
from cprop_lab.output.figures import draw, preset
from cprop_lab.output.tables import Table, bold_with_cprop, decay
from cprop_lab.run.evaluation import BINS
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run, Store
from cprop_lab.store.builds import mixed

__all__ = [
    "DRAWN_FROM",
    "Kept",
    "details",
    "digest",
    "digest_of_several",
    "draw_all",
    "equally_far",
    "kept",
    "mark",
    "mixed_builds",
    "named",
    "pictures",
    "section",
]


class Kept(NamedTuple):
    """A finished experiment."""

    about: dict[str, Any]
    runs: list[Run]
    timings: list[Run]


@cache
def kept(folder: Path, preset: str = "reduced") -> dict[str, Kept]:
    """The experiments of a preset in a storage folder, by name."""
    store = Store(folder)
    return {
        about["experiment"]: Kept(about, store.runs(about["runs"]), store.runs(about.get("timings", ())))
        for about in store.experiments().values()
        if about["preset"] == preset
    }


# Tables.


def section(experiment: Kept) -> str:
    """The table of an experiment, and how it was run."""
    by_kind: dict[str, Callable[[Kept], str]] = {
        "curves": _pairs,
        "histogram": _scales,
        "learning-rates": _searches,
        "rates": _searches,
        "scoreboard": _scores,
    }
    parts = (by_kind[experiment.about["kind"]](experiment), mixed_builds([experiment]), _made(experiment))
    return "\n\n".join(filter(None, parts))


def mixed_builds(experiments: Iterable[Kept]) -> str:
    """A mark for experiments that mix builds of torch; empty if they do not."""
    found = mixed(run for one in experiments for run in (*one.runs, *one.timings))
    return f"**{found}**" if found else ""


def _pairs(experiment: Kept) -> str:
    """Each optimizer with and without CProp: iterations to the baseline's final loss, and final results of both."""
    found = pairs(experiment.runs)
    judges = {name: judged_by(pair.plain) for name, pair in found.items()}  # may differ between workloads
    judged = " or ".join(dict.fromkeys(WORDS[column] for column in judges.values()))
    headings = ["", "learning rate", "relative iterations"]
    headings += [f"{words}, {which}" for words in (WORDS["train_loss"], judged) for which in ("plain", "with CProp")]
    rows = [
        [
            name,
            f"{pair.plain[0].specification.lr:g}",
            outcome(pair, "iterations"),
            *(ended(runs, c) for c in ("train_loss", judges[name]) for runs in (pair.plain, pair.scaled)),
        ]
        for name, pair in found.items()
    ]
    return Table(headings, rows).markdown()


def _scales(experiment: Kept) -> str:
    """The distribution of the scale, early and at the end."""
    rows = []
    for group, runs in grouped(experiment.runs).items():
        for part in (0.1, 1.0):
            step = round(part * group.iterations)
            shares = [run.histogram()[list(run.column("step")).index(step)] for run in runs]
            means = [run.column("mean_scale")[list(run.column("step")).index(step)] for run in runs]
            low, high = (
                [100 * float(share[bins].sum()) for share in shares] for bins in (slice(0, 2), slice(-2, None))
            )
            rows.append([names([group])[group], f"{step:,}", shown(means), shown(low, " %"), shown(high, " %")])
    edge = 2 / BINS
    headings = ["", "iterations", "mean scale", f"parameters below {edge:g}", f"parameters above {1 - edge:g}"]
    return Table(headings, rows).markdown()


def _searches(experiment: Kept) -> str:
    """The result of each learning rate, and the optimizer with the lowest loss first."""
    groups = grouped(experiment.runs)
    several = len({group.facet for group in groups}) > 1
    searched: dict[str, dict[float, list[float]]] = {}
    for group, runs in groups.items():
        losses = searched.setdefault(names([group])[group] + group.facet * several, {})
        losses[group.lr] = [final_loss(run) for run in runs]
    best = {name: min(losses, key=lambda lr: sum(losses[lr])) for name, losses in searched.items()}
    rows = []
    for name in sorted(searched, key=lambda name: fmean(searched[name][best[name]])):
        tried = {lr: f"{lr:g}: {shown(own, nothing='diverged')}" for lr, own in sorted(searched[name].items())}
        rows.append([name, "; ".join(f"**{text}**" if lr == best[name] else text for lr, text in tried.items())])
    return Table(["", "learning rate: final training loss (the lowest in bold)"], rows).markdown()


def named(run: Run) -> str:
    """The name of a run: its optimizer, and how it differs from the others."""
    group = run.specification.group()
    return names([group])[group] + group.facet


FIRST, SECOND = ([f"{of} {target}" for of in ("iterations", "seconds")] for target in ("first", "second"))
METRIC = "final test metric"
"""Placeholders: for the two targets, and for accuracy or perplexity."""
EARLY = f"training loss after 1/{scoreboard.HORIZON} of the iterations"
GAIN = "training loss, compared to no CProp"


def _scores(experiment: Kept) -> str:
    """The scoreboard's main columns; :func:`details` has the others."""
    return _board(experiment, [*FIRST, "final training loss", *[GAIN] * _second_version(experiment), METRIC])


def details(experiment: Kept) -> str:
    """A scoreboard's other columns."""
    tuned = ["learning rate", "weight decay"]
    return _board(
        experiment,
        [*tuned, *SECOND, "time per step", *[EARLY] * _second_version(experiment), "final test loss"],
    )


def _second_version(experiment: Kept) -> bool:
    """Whether it has the runs that version 2 of the rules asks for: shorter ones, and enough seeds to compare rows."""
    return bool(experiment.about["short"])


def _board(experiment: Kept, columns: Iterable[str]) -> str:
    """Some columns of a scoreboard, with CProp's rows in bold."""
    entries = scores(*experiment)
    judged = judged_by(entries[0].runs)

    def cells(entry: Entry) -> dict[str, str]:
        both = [scoreboard.part_in_words(entry, target, of) for target in (0, 1) for of in ("iterations", "seconds")]
        return {
            "optimizer": bold_with_cprop(entry.name),
            "learning rate": f"{entry.specification.lr:g}",
            "weight decay": decay(entry),
            **dict(zip((*FIRST, *SECOND), both, strict=True)),
            "time per step": f"{entry.cost:.2f}",
            "final training loss": ended(entry.runs, "train_loss"),
            GAIN: str(scoreboard.gain(entry, entries) or ""),
            EARLY: as_measured(entry.early(), "train_loss"),
            "final test loss": ended(entry.runs, "test_loss"),
            METRIC: ended(entry.runs, judged),
        }

    chosen = ["optimizer", *columns]
    titles = {METRIC: f"final {WORDS[judged]}"}
    for target, columns_of in zip(entries[0].targets, (FIRST, SECOND), strict=True):
        for of, column in zip(("iterations", "seconds"), columns_of, strict=True):
            titles[column] = f"{of} {scoreboard.to_the_loss_of(target)}"
    headings = [titles.get(column, column) for column in chosen]
    return Table(headings, [[line[column] for column in chosen] for line in map(cells, entries)]).markdown()


def equally_far(experiments: Mapping[str, Kept]) -> str:
    """Test results of experiments at the point where CProp reaches the plain optimizer's final training loss."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, experiment in experiments.items():
        for label, pair in pairs(experiment.runs).items():
            there = {column: pair.there(column) for column in ("test_loss", judged_by(pair.plain))}
            losses = there["test_loss"]
            lower = sum(ours < theirs for theirs, ours in losses)
            row = [
                f"`{name}`",
                label,
                *(as_measured((both[i] for both in seeds), column) for column, seeds in there.items() for i in (0, 1)),
                f"{lower} of {len(losses)}" if losses else "not reached",
            ]
            # Experiments share runs: each pair is listed where it first occurs.
            rows.setdefault(tuple(run.run_id for run in pair.scaled), row)
    kinds = ("test loss", "accuracy or perplexity")
    headings = [f"{kind}, {which}" for kind in kinds for which in ("plain", "with CProp")]
    return Table(["experiment", "", *headings, "seeds with a lower test loss"], [*rows.values()]).markdown()


def _made(experiment: Kept) -> str:
    """How an experiment was run, in one line."""
    about, runs, _ = experiment

    def all_of(key: str) -> str:
        return ", ".join(sorted({str(run.provenance[key]) for run in runs}))

    def numbers(of: Callable[[Specification], int]) -> str:
        return ", ".join(f"{n:,}" for n in sorted({of(run.specification) for run in runs}))

    kinds = ("windows" if judged_by([run]) == "perplexity" else "examples" for run in runs)
    looked_at = " or ".join(dict.fromkeys(kinds))  # images, or text
    precisions = ", ".join(sorted({run.specification.precision for run in runs}))
    return (
        f"*`{about['command']}`; preset {preset(about)}; "
        f"{numbers(lambda s: s.iterations)} iterations; seeds {numbers(lambda s: s.seed)}; evaluated on "
        f"{numbers(lambda s: s.examples)} {looked_at}; {precisions}; "
        f"torch {all_of('torch')} on {all_of('device')}, threads per run: {all_of('threads')}; "
        f"commit {all_of('commit')}*"
    )


# Figures.


def digest(experiment: Kept) -> str:
    """A digest of all numbers in a figure's runs."""
    parts = [(run.run_id, run.status, run.curves.to_pydict()) for run in (*experiment.runs, *experiment.timings)]
    return hashlib.sha256(json.dumps([experiment.about["kind"], parts]).encode()).hexdigest()[:16]


def digest_of_several(experiments: Iterable[Kept]) -> str:
    """A digest of a figure over several experiments."""
    return "-".join(digest(experiment)[:4] for experiment in experiments)


def draw_all(experiments: Iterable[Kept], folder: Path) -> None:
    """Draw all figures, each marked with the digest of its data."""
    for experiment in experiments:
        for suffix, figure in draw(*experiment).items():
            if suffix != "-times":  # these runs shared the machine: pages show iterations, in tables
                path = folder / f"{experiment.about['experiment']}{suffix}.png"
                save(figure, path)
                mark(path, digest(experiment))


def pictures(experiment: Kept, folder: Path) -> Iterator[Path]:
    """The files of an experiment's figures."""
    suffixes = ("", "-scores") if experiment.about["kind"] == "scoreboard" else ("",)
    return (folder / f"{experiment.about['experiment']}{suffix}.png" for suffix in suffixes)


DRAWN_FROM = "Drawn from"


def mark(path: Path, digest: str) -> None:
    """Add the digest of its data to a figure, and reduce it to 256 colors: the repository keeps every version."""
    about = PngInfo()
    about.add_text(DRAWN_FROM, digest)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, pnginfo=about, optimize=True)
