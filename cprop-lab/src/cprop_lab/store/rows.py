"""Runs as rows of a table: their format, their checksums, and what is said of a damaged one."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, get_args

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
    "Rows",
    "Run",
    "as_rows",
    "as_text",
    "kind_of",
    "manifest_of",
    "manifest_text",
    "measured",
    "one_line",
    "runs_of",
    "to_row",
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


IDENTITY: Final = re.compile(rb"[0-9a-f]{16}")
"""A run's id."""


ALWAYS: Final = frozenset({"experiment", "kind", "learning_rates", "panels", "preset", "reduced", "runs", "title"})
"""What every manifest of an experiment has, also one without a checksum."""


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


def _row(about: Mapping[str, Any], curves: pa.Table) -> pa.Table:
    """A run as a table of one row."""
    lists = {name: pa.ListArray.from_arrays([0, len(curves)], _one(curves[name])) for name in SCHEMA.names}
    return pa.table({"identity": [about["identity"]], "about": [as_text(about)], **lists}, ROWS)


def to_row(about: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> pa.Table:
    """A run that has ended as a table of one row, with a checksum of its curves for older versions, and one of all."""
    curves = pa.Table.from_pylist([dict(evaluation) for evaluation in evaluations], schema=SCHEMA)
    plain = json.loads(as_text(about))  # as a reader sees it
    (columns,) = _columns(_row(plain, curves))
    plain["checksum"] = _checksum(columns)
    return _row({**plain, "row_checksum": _checksum(columns, plain)}, curves)


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


def _checksum(columns: Mapping[str, Values], about: Mapping[str, Any] | None = None) -> str:
    """A digest of a run's curves, however they are stored, and of what is said about it."""
    hashed = hashlib.sha256(b"" if about is None else _canonical(about))
    for name in SCHEMA.names:
        hashed.update(columns[name].tobytes())
    return hashed.hexdigest()[:16]


def _canonical(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, sort_keys=True).encode()


def _texts(table: pa.Table) -> list[bytes]:
    """What is said about each row; as bytes, since damaged ones may be no text."""
    texts: list[bytes] = table["about"].cast(pa.binary()).to_pylist()
    return texts


def runs_of(names: Sequence[str], table: pa.Table) -> Iterator[Run | DamagedError]:
    """The run of each row, or what is wrong with it."""
    try:
        columns = list(_columns(table))
        texts = _texts(table)
    except Exception as error:  # damaged rows may raise anything; they are looked for one by one
        if len(table) > 1:
            for row, name in enumerate(names):
                yield from runs_of([name], table.slice(row, 1))
        else:
            yield DamagedError(f"its curves cannot be read ({one_line(error)})", names[0])
        return
    for name, text, own in zip(names, texts, columns, strict=True):
        try:
            yield _to_run(name, text, own)
        except DamagedError as error:
            yield error


def _to_run(name: str, text: bytes, columns: Mapping[str, Values]) -> Run:
    """A run from its row.

    Raises:
        DamagedError: if the row is not that run's, or has been changed.
    """
    try:
        about = json.loads(text)
        stored = dict(about["specification"])
        if (own := digest(stored)) != name or about["identity"] != name:
            raise DamagedError(f"its specification is another run's ({own}), or was edited", name)
        # Rows of older versions have a checksum of their curves alone, or none.
        whole = about.pop("row_checksum", None)
        if (whole is not None and whole != _checksum(columns, about)) or (
            whole is None and about.get("checksum") not in (None, _checksum(columns))
        ):
            raise DamagedError("it does not match its checksum: it is another run's, or was changed", name)
        status, made = about["status"], about["made"]
        if status not in get_args(Status) or not isinstance(made, dict):
            raise DamagedError("how it ended, or how it was made, cannot be read", name)
        for known in ("numerics", "code"):
            stored.pop(known)
        stored.pop("with", None)
    except DamagedError:
        raise
    except Exception as error:  # damaged text may be anything
        raise DamagedError(f"its specification cannot be read ({one_line(error)})", name) from error
    try:
        return Run(name, Specification.from_dict(stored), status, made, columns)
    except ValueError as error:  # as its id is right, this is how it was written
        raise DamagedError(one_line(error, kind=False), name, newer=True) from error


def one_line(error: BaseException, kind: bool = True) -> str:
    """What was raised by damaged bytes, in a line that can be printed."""
    text = textwrap.shorten(f"{type(error).__name__}: {error}" if kind else str(error), 300)
    return "".join(one if one.isprintable() else "?" for one in text)


class Pack:
    """A packed experiment. Runs are read in groups of rows, when they are needed.

    Raises:
        ValueError: if the file is another.

    Attributes:
        about: its manifest; None if it has none, or a damaged one.
        rows: where each run is.
        wrong: what is damaged beside those runs, in words.
    """

    def __init__(self, path: str, file: pq.ParquetFile, stamp: tuple[int, int]) -> None:
        self.path, self.file, self.stamp = path, file, stamp
        if missing := [name for name in ROWS.names if name not in file.schema_arrow.names]:
            raise ValueError(f"it has no column {missing[0]!r}")
        self.wrong: list[str] = []
        self.about: dict[str, Any] | None = None
        try:
            text = (file.metadata.metadata or {}).get(b"experiment")
            self.about = None if text is None else manifest_of(text)
        except DamagedError as error:
            self.wrong.append(f"its manifest is damaged, {error}")
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self.starts = np.cumsum([0, *groups])
        self.rows: dict[str, int] = {}
        for group, size in enumerate(groups):
            names = self._names(group, size)
            self.rows.update((name, int(self.starts[group]) + row) for row, name in enumerate(names) if name)
            if lost := names.count("") + size - len(names):
                where = f"its rows {self.starts[group]} to {self.starts[group + 1] - 1}"
                self.wrong.append(f"{lost} runs, in {where}, cannot be read, nor their ids")

    def _names(self, group: int, size: int) -> list[str]:
        """The ids of a group's rows; from what is said about each if the column is damaged, empty if that is too."""
        try:
            table = self.file.read_row_group(group, columns=["identity"])
            names = [value.decode() for value in table["identity"].cast(pa.binary()).to_pylist()]
            if len(names) == size and all(IDENTITY.fullmatch(name.encode()) for name in names):
                return names
        except Exception:  # pyarrow raises a dozen kinds for damaged bytes
            names = []
        try:
            texts = _texts(self.file.read_row_group(group, columns=["about"]))
        except Exception:
            return []
        found = (re.search(rb'"identity": "(%s)"' % IDENTITY.pattern, text or b"") for text in texts[:size])
        return [match[1].decode() if match else "" for match in found]

    def read(self, names: Iterable[str]) -> Iterator[Rows]:
        """Some runs, one group of rows after the other."""
        rows = sorted((self.rows[name], name) for name in names)
        groups = np.searchsorted(self.starts, [row for row, _ in rows], side="right") - 1
        for group in dict.fromkeys(groups.tolist()):
            chosen = [pair for pair, own in zip(rows, groups, strict=True) if own == group]
            found: pa.Table | DamagedError
            try:
                table = self.file.read_row_group(group, columns=ROWS.names)
                found = as_rows(table.take([row - int(self.starts[group]) for row, _ in chosen]))
            except Exception as error:  # pyarrow raises a dozen kinds for damaged bytes
                found = DamagedError(f"its rows from {self.starts[group]} on cannot be read ({one_line(error)})")
            yield [name for _, name in chosen], found, self


Rows = tuple[Sequence[str], pa.Table | DamagedError, Pack | None]
"""The ids of some runs, their rows or what is wrong with all of them, and the packed experiment that they are from."""


def as_text(about: Mapping[str, Any]) -> str:
    """JSON that people may read."""
    return json.dumps(dict(about), indent=2) + "\n"


def manifest_text(about: Mapping[str, Any]) -> str:
    """An experiment's manifest as it is stored: with a checksum."""
    plain = json.loads(as_text(about))  # as a reader sees it
    return as_text({**plain, "checksum": hashlib.sha256(_canonical(plain)).hexdigest()[:16]})


def manifest_of(text: bytes) -> dict[str, Any]:
    """An experiment's manifest.

    Raises:
        DamagedError: if it cannot be read, or was changed.
    """
    try:
        about = json.loads(text)
        checksum = about.pop("checksum", None)
        # Older versions wrote none.
        whole = hashlib.sha256(_canonical(about)).hexdigest()[:16] == checksum if checksum else about.keys() >= ALWAYS
    except Exception as error:  # damaged text may be anything
        raise DamagedError(f"it cannot be read ({one_line(error)})") from error
    if not whole:
        raise DamagedError("it does not match its checksum" if checksum else "it lacks what every manifest has")
    found: dict[str, Any] = about
    return found


def kind_of(table: pa.Table) -> list[tuple[str, str]]:
    """The workload and the optimizer of each row's run."""
    found = (json.loads(text)["specification"] for text in _texts(table))
    return [(specification["workload"], specification["optimizer"]) for specification in found]
