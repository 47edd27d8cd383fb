"""Tables: built once, and shown on a terminal, in HTML and in Markdown."""

from __future__ import annotations

import csv
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import rich.table
from rich.console import Console, ConsoleOptions

from cprop_lab.analysis.curves import ended
from cprop_lab.analysis.groups import WORDS, by_workload, grouped, judged_by, metric, names, with_status
from cprop_lab.analysis.pairs import Pair
from cprop_lab.analysis.scoreboard import Entry, part_in_words, to_the_loss_of
from cprop_lab.analysis.spread import NOTHING, shown
from cprop_lab.run.evaluation import METRICS
from cprop_lab.store import Run, measured

__all__ = ["Table", "all_runs", "bold_with_cprop", "decay", "final_values", "folded", "scoreboard", "times_to_target"]

BETWEEN: Final = 2
"""Spaces that rich puts around a column's text in a table without a box."""


TIED: Final = re.compile(r"(?<=±) | (?=[±%])")


TIE: Final = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Table:
    """A table of text. ``console.print(table)`` shows it on a terminal, the template ``table.html`` in HTML.

    Args:
        headings: of the columns.
        rows: the cells.
        words: how many of the first columns hold words, aligned left in HTML; numbers are aligned right.

    Example:
        >>> print(Table(["", "ducks"], [["pond", "1"]]).markdown())
        |  | ducks |
        | --- | --- |
        | pond | 1 |
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def markdown(self) -> str:
        """As lines of Markdown."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self, path: Path) -> None:
        """Write it to a file for spreadsheets."""
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.headings, *self.rows])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.table.Table]:
        yield from self.fitting(options.max_width)

    def fitting(self, width: int) -> Iterator[rich.table.Table]:
        """For a terminal: one table, or several with the same first column if it is too narrow for one.

        Example:
            >>> birds = Table(["", "ducks", "geese"], [["pond", "1", "2"]])
            >>> for width in (40, 12):
            ...     tables = birds.fitting(width)
            ...     print([[column.header for column in table.columns] for table in tables])
            [['', 'ducks', 'geese']]
            [['', 'ducks'], ['', 'geese']]
        """
        lines = (self.headings, *self.rows)
        # Left to itself, rich cuts names and parts "1.2 ± 0.3 %" at the end of a line.
        tied = [[TIED.sub(TIE, cell) if i else cell.replace(" ", TIE) for i, cell in enumerate(r)] for r in lines]
        cells = list(zip(*tied, strict=True))
        wide = [max(map(len, column)) for column in cells]
        narrow = [max(len(word) for cell in column for word in cell.split(" ")) for column in cells]

        def table(columns: Sequence[int]) -> rich.table.Table:
            room = width - sum(narrow[i] + BETWEEN for i in columns)
            widths = {}
            for i in columns:
                widths[i] = narrow[i] + max(0, min(wide[i] - narrow[i], room))
                room -= widths[i] - narrow[i]
            head, *body = ([folded(row[i], widths[i]) for i in columns] for row in tied)
            made = rich.table.Table(*head, box=None)
            for row in body:
                made.add_row(*row)
            return made

        columns = [0]
        for i in range(1, len(self.headings)):
            if len(columns) > 1 and sum(narrow[j] + BETWEEN for j in (*columns, i)) > width:
                yield table(columns)
                columns = [0]
            columns.append(i)
        yield table(columns)


def folded(text: str, width: int) -> str:
    """Text in lines no wider than that, which part neither a number from its unit nor a name at its hyphen."""
    lines = textwrap.wrap(TIED.sub(TIE, text), max(1, width), break_on_hyphens=False)
    return "\n".join(lines).replace(TIE, " ")


# What is tabulated.


def scoreboard(entries: Sequence[Entry]) -> Table:
    """The scoreboard."""
    column = judged_by(entries[0].runs)
    targets = entries[0].targets
    headings = ["optimizer", "learning rate", "weight decay"]
    for target in targets:
        headings += [f"{of} {to_the_loss_of(target)}" for of in ("iterations", "seconds")]
    ends = dict.fromkeys(("train_loss", "test_loss", column))
    headings += ["time per step", *(f"final {WORDS[name]}" for name in ends)]
    rows = [
        [
            entry.name,
            f"{entry.specification.lr:g}",
            decay(entry),
            *(part_in_words(entry, target, of) for target in range(len(targets)) for of in ("iterations", "seconds")),
            f"{entry.cost:.2f}",
            *(ended(entry.runs, name) for name in ends),
        ]
        for entry in entries
    ]
    return Table(headings, rows)


def bold_with_cprop(row: str) -> str:
    """The name of a row in Markdown, bold if it has CProp.

    Example:
        >>> bold_with_cprop("CProp(Adam)"), bold_with_cprop("Adam")
        ('**CProp(Adam)**', 'Adam')
    """
    return f"**{row}**" if "CProp" in row else row


def decay(entry: Entry) -> str:
    """A row's weight decay."""
    return f"{entry.specification.settings.get('weight_decay', 0.0):g}"


def times_to_target(pairs: Mapping[str, Pair]) -> Table:
    """Iterations and seconds to the plain optimizer's final loss, without and with CProp."""
    headings = ["", "target loss"]
    for of in ("iterations", "seconds"):
        headings += [f"{of} without", "with CProp", "ratio"]
    return Table([*headings, "seeds that reached it"], [[name, *_to_target(pair)] for name, pair in pairs.items()])


def _to_target(pair: Pair) -> list[str]:
    shares = pair.shares("iterations")
    if not shares:
        return ["did not learn without CProp", *[NOTHING] * 7]
    cells = [shown(pair.targets)]
    for of in ("iterations", "seconds"):
        times = pair.times(of)
        cells.append(shown([without for without, _ in times]))
        cells.append(shown([ours for _, ours in times], nothing="not reached"))
        cells.append(shown(pair.shares(of), nothing="not reached") if pair.comparable(of) else NOTHING)
    others = len(pair.plain) - len(shares)
    reached = sum(map(math.isfinite, shares))
    cells.append(f"{reached} of {len(shares)}" + f" ({others} did not learn without CProp)" * bool(others))
    return cells


def final_values(runs: Sequence[Run]) -> Table:
    """Final losses and metrics of each group of runs."""
    groups = grouped(runs)
    named = names(groups, without=("lr",))
    places = by_workload(groups)
    several = len(places) > 1
    metrics = [column for column in METRICS if measured(runs, column)]
    headings = ["optimizer", "learning rate", "seeds", WORDS["train_loss"], WORDS["test_loss"]]
    headings += [*[" or ".join(WORDS[column] for column in metrics)] * bool(metrics), "ms per step"]
    rows = [
        [*[where] * several, named[group], f"{group.lr:g}", *_end(groups[group], bool(metrics))]
        for where, members in places.items()
        for group in members
    ]
    return Table(["workload"] * several + headings, rows, words=1 + several)


def _end(runs: Sequence[Run], with_metric: bool) -> list[str]:
    """The cells of a group of runs; diverged runs are counted, and left out of the means."""
    diverged = len(with_status(runs, "diverged"))
    return [
        f"{len(runs)}" + f" ({diverged} diverged)" * bool(diverged),
        ended(runs, "train_loss"),
        ended(runs, "test_loss", NOTHING),
        *[ended(runs, metric(runs), NOTHING)] * with_metric,
        shown([1000 * run.column("seconds")[-1] / run.column("step")[-1] for run in runs if run.column("step")[-1]]),
    ]


def all_runs(runs: Sequence[Run]) -> Table:
    """Every run and its settings."""
    headings = ["run", "ended", *(name.replace("_", " ") for name in runs[0].specification.to_dict())]
    rows = [[run.run_id, run.status, *map(_setting, run.specification.to_dict().values())] for run in runs]
    return Table(headings, rows, words=len(headings))


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(inner)}" for name, inner in value.items()) or NOTHING
    return f"{value:g}" if isinstance(value, float) else str(value)
