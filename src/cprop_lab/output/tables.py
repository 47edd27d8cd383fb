"""Tables, built once and shown on a terminal, in HTML and in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

__all__ = ["fitting", "folded"]

BETWEEN: Final = 2
"""Spaces that rich puts around a column's text in a table without a box."""


TIED: Final = re.compile(r"(?<=±) | (?=[±%])")


TIE: Final = "\N{NO-BREAK SPACE}"


def fitting(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    """A table, or several with the same first column if the terminal is too narrow for one.

    Example:
        >>> for width in (40, 12):
        ...     tables = fitting(Console(width=width), ["", "ducks", "geese"], [["pond", "1", "2"]])
        ...     print([[column.header for column in table.columns] for table in tables])
        [['', 'ducks', 'geese']]
        [['', 'ducks'], ['', 'geese']]
    """
    # Left to itself, rich cuts names and parts "1.2 ± 0.3 %" at the end of a line.
    tied = [[TIED.sub(TIE, cell) if i else cell.replace(" ", TIE) for i, cell in enumerate(r)] for r in (heads, *rows)]
    cells = list(zip(*tied, strict=True))
    wide = [max(map(len, column)) for column in cells]
    narrow = [max(len(word) for cell in column for word in cell.split(" ")) for column in cells]

    def table(columns: Sequence[int]) -> Table:
        room = console.width - sum(narrow[i] + BETWEEN for i in columns)
        widths = {}
        for i in columns:
            widths[i] = narrow[i] + max(0, min(wide[i] - narrow[i], room))
            room -= widths[i] - narrow[i]
        head, *body = ([folded(row[i], widths[i]) for i in columns] for row in tied)
        made = Table(*head, box=None)
        for row in body:
            made.add_row(*row)
        return made

    columns = [0]
    for i in range(1, len(heads)):
        if len(columns) > 1 and sum(narrow[j] + BETWEEN for j in (*columns, i)) > console.width:
            yield table(columns)
            columns = [0]
        columns.append(i)
    yield table(columns)


def folded(text: str, width: int) -> str:
    """Text in lines no wider than that, which do not part a number from its unit."""
    return "\n".join(textwrap.wrap(TIED.sub(TIE, text), max(1, width))).replace(TIE, " ")
