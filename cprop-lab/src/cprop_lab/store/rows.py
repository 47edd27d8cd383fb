"""Runs as rows of a table: their format, their checksums, and what is said of a damaged one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cprop_lab.run.evaluation import BINS, Evaluation, Status
from cprop_lab.run.identity import digest
from cprop_lab.run.specification import Specification

__all__ = [
    "ROWS",
    "SCHEMA",
    "DamagedError",
    "Pack",
    "Run",
    "as_rows",
    "as_text",
    "curves_of",
    "kind_of",
    "measured",
    "row",
    "to_row",
    "to_run",
]

Values = np.ndarray[Any, np.dtype[Any]]

SCHEMA: Final = pa.schema(
    {
        "step": pa.int64(),
        "seconds": pa.float64(),  # of training alone, evaluations left out
        "train_loss": pa.float64(),
        "test_loss": pa.float64(),
        "accuracy": pa.float64(),
        "perplexity": pa.float64(),
        "lr": pa.float64(),
        "mean_scale": pa.float64(),
        "scale_histogram": pa.list_(pa.float32()),  # shares of all parameters
    }
)
"""A run's curves: one row per evaluation."""

ROWS: Final = pa.schema(
    {
        "identity": pa.string(),
        "about": pa.string(),
        **{name: pa.list_(SCHEMA.field(name).type) for name in SCHEMA.names},
    }
)
"""Runs as rows: the specification and all else as text in ``about``, and the curves as lists."""


class DamagedError(ValueError):
    """What is stored of a run is damaged, or cannot be read by this version.

    Args:
        message: what is wrong.
        run: its id.
        newer: whether it is a newer version's, and not damaged.
    """

    def __init__(self, message: str, run: str = "", newer: bool = False) -> None:
        super().__init__(message)
        self.run, self.newer = run, newer


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: what it was, and its curves.

    Args:
        run_id: sixteen hexadecimal digits.
        specification: what was run.
        status: how it ended.
        provenance: how and where it was made.
        columns: the curves as arrays, by the names of :data:`SCHEMA`; NaN where nothing was measured.

    Attributes:
        cache: what was computed from the curves, such as smoothed ones.
    """

    run_id: str
    specification: Specification
    status: Status
    provenance: Mapping[str, Any]
    columns: Mapping[str, Values]
    cache: dict[str, Values] = field(default_factory=dict, init=False, repr=False)

    def column(self, name: str) -> Values:
        """A curve's values, one per evaluation; NaN where there is none."""
        return self.columns[name]

    def histogram(self) -> Values:
        """The scale's distribution over time: one row per evaluation, one column per bin."""
        return self.columns["scale_histogram"].astype(float)

    @property
    def curves(self) -> pa.Table:
        """The curves as a table."""
        plain: dict[str, Any] = {
            name: pa.array(values, SCHEMA.field(name).type, from_pandas=True, safe=False)
            for name, values in self.columns.items()
            if values.ndim == 1
        }
        shares = [None if np.isnan(row).all() else row for row in self.columns["scale_histogram"]]
        return pa.table({**plain, "scale_histogram": shares}, SCHEMA)


def measured(runs: Iterable[Run], column: str) -> bool:
    """Whether any run has such a curve."""
    return any(np.isfinite(run.column(column)).any() for run in runs)


# Runs as rows of a table.


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def row(about: Mapping[str, Any] | str, curves: pa.Table) -> pa.Table:
    """A run as a table of one row."""
    text = about if isinstance(about, str) else as_text(about)
    lists = {name: pa.ListArray.from_arrays([0, len(curves)], _one(curves[name])) for name in SCHEMA.names}
    return pa.table({"identity": [json.loads(text)["identity"]], "about": [text], **lists}, ROWS)


def to_row(about: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> pa.Table:
    """A run that has ended as a table of one row, with a checksum of its curves."""
    curves = pa.Table.from_pylist([dict(evaluation) for evaluation in evaluations], schema=SCHEMA)
    (columns,) = _columns(row(about, curves))
    return row({**about, "checksum": _checksum(columns)}, curves)


def as_rows(table: pa.Table) -> pa.Table:
    """A table that was read, if it is one of runs; a cast would take most of the time of reading a run."""
    return table if table.schema.equals(ROWS) else table.select(ROWS.names).cast(ROWS)


def _arrays(lists: pa.ListArray, name: str) -> list[Values]:
    """A curve of many runs as one array per run, without a copy per run."""
    ends, values = lists.offsets.to_numpy(), lists.flatten()
    ends = ends - ends[0]
    if name == "scale_histogram":
        whole = np.full((len(values), BINS), np.nan, np.float32)
        whole[values.is_valid().to_numpy(zero_copy_only=False)] = values.flatten().to_numpy().reshape(-1, BINS)
    else:
        whole = np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
    return [whole[first:last] for first, last in pairwise(ends)]


def _columns(table: pa.Table) -> Iterator[dict[str, Values]]:
    """The curves of each row.

    Raises:
        ValueError: if they are not curves.
    """
    arrays = [_arrays(_one(table[name]), name) for name in SCHEMA.names]
    return (dict(zip(SCHEMA.names, own, strict=True)) for own in zip(*arrays, strict=True))


def _checksum(columns: Mapping[str, Values]) -> str:
    """A digest of a run's curves, however they are stored."""
    hashed = hashlib.sha256()
    for name in SCHEMA.names:
        hashed.update(columns[name].tobytes())
    return hashed.hexdigest()[:16]


def curves_of(table: pa.Table) -> Iterable[Mapping[str, Values] | DamagedError]:
    """The curves of each row, or what is wrong with them."""
    try:
        return list(_columns(table))
    except ValueError as error:
        if len(table) == 1:
            return [DamagedError(f"its curves cannot be read ({error})")]
        return [one for row in range(len(table)) for one in curves_of(table.slice(row, 1))]


def to_run(name: str, text: str, columns: Mapping[str, Values] | DamagedError) -> Run:
    """A run from its row.

    Raises:
        DamagedError: if the row is not that run's, or has been changed.
    """
    if isinstance(columns, DamagedError):
        raise columns
    try:
        about = json.loads(text)
        stored = dict(about["specification"])
        if digest(stored) != name or about["identity"] != name:
            raise DamagedError("its specification is another run's, or was edited")
        if "checksum" in about and about["checksum"] != _checksum(columns):
            raise DamagedError("its curves are another run's, or were changed")
        for known in ("numerics", "code"):
            stored.pop(known)
        stored.pop("with", None)
        return Run(name, Specification.from_dict(stored), about["status"], about["made"], columns)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedError(f"its specification cannot be read ({type(error).__name__}: {error})") from error
    except DamagedError:
        raise
    except ValueError as error:  # as its id is right, this is how it was written
        raise DamagedError(str(error), newer=True) from error


class Pack:
    """A packed experiment. Runs are read in groups of rows, when they are needed."""

    def __init__(self, path: str, file: pq.ParquetFile, stamp: tuple[int, int]) -> None:
        self.path, self.file, self.stamp = path, file, stamp
        self.about: dict[str, Any] = json.loads((file.schema_arrow.metadata or {})[b"experiment"])
        groups = (file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
        self.starts = np.cumsum([0, *groups])
        self.rows = {name: row for row, name in enumerate(file.read(["identity"])["identity"].to_pylist())}

    def read(self, names: Iterable[str]) -> Iterator[tuple[Sequence[str], pa.Table | DamagedError]]:
        """Some runs, one group of rows after the other."""
        rows = sorted((self.rows[name], name) for name in names)
        groups = np.searchsorted(self.starts, [row for row, _ in rows], side="right") - 1
        for group in dict.fromkeys(groups.tolist()):
            chosen = [pair for pair, own in zip(rows, groups, strict=True) if own == group]
            found: pa.Table | DamagedError
            try:
                table = self.file.read_row_group(group, columns=ROWS.names)
                found = as_rows(table.take([row - int(self.starts[group]) for row, _ in chosen]))
            except (OSError, ValueError) as error:
                found = DamagedError(f"its rows from {self.starts[group]} on cannot be read ({error})")
            yield [name for _, name in chosen], found


def as_text(about: Mapping[str, Any]) -> str:
    """JSON that people may read."""
    return json.dumps(dict(about), indent=2) + "\n"


def kind_of(text: str) -> tuple[str, str]:
    """The workload and the optimizer of a run."""
    specification = json.loads(text)["specification"]
    return specification["workload"], specification["optimizer"]
