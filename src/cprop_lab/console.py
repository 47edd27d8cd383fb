"""What a person at the keyboard sees: how far runs are, and tables that fit the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from cprop_lab import optimizers
from cprop_lab.progress import Progress
from cprop_lab.results import Row
from cprop_lab.specification import Specification
from cprop_lab.targets import facet

__all__ = ["LiveTable", "fitting"]

BETWEEN: Final = 2
"""Blanks that rich puts around a column's text in a table without a box."""


def fitting(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    """A table, or several with the same first column where the terminal is too narrow for all words of one.

    Example:
        >>> for width in (40, 12):
        ...     tables = fitting(Console(width=width), ["", "ducks", "geese"], [["pond", "1", "2"]])
        ...     print([[column.header for column in table.columns] for table in tables])
        [['', 'ducks', 'geese']]
        [['', 'ducks'], ['', 'geese']]
    """

    def widths(i: int) -> tuple[int, int]:
        cells = (heads[i], *(row[i] for row in rows))
        # The first column's names stay whole, and so does "1.2 ± 0.3 %".
        pieces = (piece for cell in cells for piece in (re.split(r"(?<!±) (?![±%])", cell) if i else [cell]))
        return max(map(len, pieces)), max(map(len, cells))

    # Left to itself, rich shrinks all columns alike, and cuts words that had room.
    narrow, wide = zip(*map(widths, range(len(heads))), strict=True)

    def table(columns: Sequence[int]) -> Table:
        room = console.width - sum(narrow[i] + BETWEEN for i in columns)
        made = Table(box=None)
        for i in columns:
            more = max(0, min(wide[i] - narrow[i], room))
            made.add_column(heads[i], width=narrow[i] + more)
            room -= more
        for row in rows:
            made.add_row(*(row[i] for i in columns))
        return made

    columns = [0]
    for i in range(1, len(heads)):
        if len(columns) > 1 and sum(narrow[j] + BETWEEN for j in (*columns, i)) > console.width:
            yield table(columns)
            columns = [0]
        columns.append(i)
    yield table(columns)


def setting(specification: Specification) -> str:
    """What a run trains: its workload, and how that differs from the usual one."""
    return specification.workload + facet(specification)


class LiveTable(Progress):
    """A table of the runs under way, and a bar of all.

    On a terminal it is redrawn in place; in a log, a line is written for every run that ends.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self.rows: dict[Specification, Row] = {}
        self.live: Live | None = None

    def begin(self, total: Sequence[Specification], done: int) -> None:
        """Show an empty table."""
        self.rows.clear()
        for task in list(self.bar.task_ids):
            self.bar.remove_task(task)
        workloads = ", ".join(dict.fromkeys(specification.workload for specification in total))
        self.task = self.bar.add_task(f"runs of {workloads}" if workloads else "runs", total=len(total), completed=done)
        if done:
            self.console.print(f"{done} of {len(total)} runs are finished already, and are not run again.")
        if done < len(total) and self.console.is_terminal:
            self.live = Live(self.render(), console=self.console, refresh_per_second=2, transient=True)
            self.live.start()

    def render(self) -> Group:
        """The table and the bar."""
        table = Table("workload", "optimizer", "lr", "seed", "iterations", "training loss", "ms a step", box=None)
        for specification, row in self.rows.items():
            pace = 1000 * row["seconds"] / row["step"] if row["step"] and row["seconds"] else float("nan")
            table.add_row(
                setting(specification),
                optimizers.label(specification),
                f"{specification.lr:g}",
                str(specification.seed),
                f"{row['step']:,} of {specification.iterations:,}",
                f"{row['train_loss']:.4f}",
                f"{pace:.2f}",
            )
        if not self.rows:
            return Group(Text("finishing ..." if self.bar.finished else "starting ..."), self.bar)
        return Group(table, self.bar)

    def _draw(self) -> None:
        if self.live is not None:
            self.live.update(self.render())

    def row(self, specification: Specification, row: Row) -> None:
        """Show how far a run is."""
        self.rows[specification] = row
        self._draw()

    def ended(self, specification: Specification) -> None:
        """Count a run, and take it off the table."""
        row = self.rows.pop(specification, None)
        self.bar.advance(self.task)
        if self.live is None and row is not None:
            task = self.bar.tasks[0]
            self.console.print(
                f"[{task.completed:.0f}/{task.total:.0f}] {setting(specification)} {optimizers.label(specification)} "
                f"lr {specification.lr:g} seed {specification.seed}: training loss {row['train_loss']:.4f}",
                markup=False,
            )
        self._draw()

    def failed(self, specification: Specification, error: str) -> None:
        """Say what went wrong."""
        self.console.print(
            f"{setting(specification)} {optimizers.label(specification)} seed {specification.seed} failed: {error}",
            style="red",
            markup=False,
        )

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self.live is not None:
            self.live.stop()
            self.live = None
