"""The store: one Arrow file per run, or one Parquet file per packed experiment; in both, a run is a row.

A store is a folder or an address in an object store, whatever ``pyarrow`` opens. Nothing in it is a
pickle except the checkpoint of an unfinished run, which is read with ``weights_only``. Reading needs no torch.

    runs/<run id>.arrow                   a run: its curves, its specification, how it ended, and its provenance
    checkpoints/<run id>.pt               of a run that is not finished
    experiments/<name>-<preset>.json      an experiment's manifest: which runs belong to it
    experiments/<name>-<preset>.parquet   a packed experiment: its manifest and all of its runs

Older versions wrote two files per run, ``.parquet`` with the curves and ``.json`` with the rest. They are read as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlparse
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cprop_lab.run.evaluation import BINS, Evaluation, Status
from cprop_lab.run.identity import digest, resolve, run_id
from cprop_lab.run.specification import Specification

__all__ = ["DamagedError", "Manifest", "Run", "StorageError", "Store", "measured"]

Manifest = Mapping[str, Any]
"""What is stored about an experiment: its runs, and what a reader should know."""

Values = np.ndarray[Any, np.dtype[Any]]
Item = TypeVar("Item")
Result = TypeVar("Result")

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

BATCH: Final = 1_000
"""Runs that are read, or written to a packed experiment, at a time."""

ATOMIC: Final = ("s3", "gcs", "abfs")
"""Kinds of storage where a file that is written is there as a whole, or not at all."""

CONNECTIONS: Final = 32
"""Files that are read at the same time from storage that is not a disk: most of the time goes into waiting."""


SEEN_WITHIN: Final = 5.0
"""Seconds after which what one machine has written is seen by all."""


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


class StorageError(OSError):
    """The storage cannot be used: it is full, read-only, or not shared."""


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


def _row(about: Mapping[str, Any] | str, curves: pa.Table) -> pa.Table:
    """A run as a table of one row."""
    text = about if isinstance(about, str) else _text(about)
    lists = {name: pa.ListArray.from_arrays([0, len(curves)], _one(curves[name])) for name in SCHEMA.names}
    return pa.table({"identity": [json.loads(text)["identity"]], "about": [text], **lists}, ROWS)


def _as_rows(table: pa.Table) -> pa.Table:
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


def _curves(table: pa.Table) -> Iterable[Mapping[str, Values] | DamagedError]:
    """The curves of each row, or what is wrong with them."""
    try:
        return list(_columns(table))
    except ValueError as error:
        if len(table) == 1:
            return [DamagedError(f"its curves cannot be read ({error})")]
        return [one for row in range(len(table)) for one in _curves(table.slice(row, 1))]


def _run(name: str, text: str, columns: Mapping[str, Values] | DamagedError) -> Run:
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
        return Run(name, Specification.from_dict(stored), about["status"], about["made"], columns)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedError(f"its specification cannot be read ({type(error).__name__}: {error})") from error
    except DamagedError:
        raise
    except ValueError as error:  # as its id is right, this is how it was written
        raise DamagedError(str(error), newer=True) from error


class _Pack:
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
                found = _as_rows(table.take([row - int(self.starts[group]) for row, _ in chosen]))
            except (OSError, ValueError) as error:
                found = DamagedError(f"its rows from {self.starts[group]} on cannot be read ({error})")
            yield [name for _, name in chosen], found


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(dict(about), indent=2) + "\n"


def _kind(text: str) -> tuple[str, str]:
    """The workload and the optimizer of a run."""
    specification = json.loads(text)["specification"]
    return specification["workload"], specification["optimizer"]


def _sync(path: str) -> None:
    """Have a file or a folder written to the disk, so that it survives a power failure."""
    with suppress(PermissionError):  # a folder that may be written and not read
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Store:
    """Where runs are kept.

    Args:
        address: a folder, or an address such as ``s3://bucket/path`` that pyarrow opens.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Store(folder).finished()
        set()
    """

    def __init__(self, address: str | Path) -> None:
        text = str(address)
        if not urlparse(text).scheme:
            text = Path(text).expanduser().absolute().as_uri()
        self.address = text
        if text.startswith("s3://"):
            text += ("&" if "?" in text else "?") + "allow_delayed_open=true"  # a small file is one request
        self._files, self._root = fs.FileSystem.from_uri(text)
        self._disk = isinstance(self._files, fs.LocalFileSystem)
        self._own: dict[str, str] = {}  # runs with a file of their own, and its suffix
        self._packs: dict[str, _Pack] = {}
        self._pack_of: dict[str, _Pack] = {}

    # Files that are there as a whole or not at all, on a disk and in an object store.

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, contents: bytes | Path) -> None:
        try:
            self._write_whole(self._path(name), contents)
        except OSError as error:
            # On a full disk pyarrow's message has several sentences.
            told = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                f"{self._path(name)} cannot be written: {told}. Make room, or give --storage another place"
            ) from error

    def _write_whole(self, path: str, contents: bytes | Path) -> None:
        if self._files.type_name in ATOMIC:
            self._put(path, contents)
            return
        folder, _, last = path.rpartition("/")
        aside = f"{folder}/.{uuid4().hex}-{last}"
        self._files.create_dir(folder)
        try:
            self._put(aside, contents)
            self._files.move(aside, path)
        except BaseException:
            with suppress(OSError):
                self._files.delete_file(aside)
            raise
        if self._disk:
            _sync(folder)

    def _put(self, path: str, contents: bytes | Path) -> None:
        with (
            self._files.open_output_stream(path) as stream,
            io.BytesIO(contents) if isinstance(contents, bytes) else contents.open("rb") as source,
        ):
            shutil.copyfileobj(source, stream, 1 << 24)
        if self._disk:
            _sync(path)

    def _read(self, name: str) -> bytes | None:
        try:
            with self._files.open_input_file(self._path(name)) as stream:
                contents: bytes = stream.read()
                return contents
        except FileNotFoundError:
            return None

    def _each(self, do: Callable[[Item], Result], items: Sequence[Item]) -> Iterable[Result]:
        """Do something with many files: on a disk one after the other, elsewhere many at a time."""
        if self._disk or len(items) < 2:
            return map(do, items)
        with ThreadPoolExecutor(min(CONNECTIONS, len(items))) as pool:
            return list(pool.map(do, items))

    def _found(self, folder: str, *suffixes: str) -> Iterator[tuple[str, str, fs.FileInfo]]:
        """The files of a folder, by name and suffix; those that are being written are left out."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        for info in self._files.get_file_info(selector):
            name, dot, suffix = info.base_name.rpartition(".")
            if name and dot + suffix in suffixes and not name.startswith("."):
                yield name, dot + suffix, info

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._path(name))

    def _open_packs(self, broken: dict[str, str] | None = None) -> None:
        """Find the packed experiments; those that have not changed stay open."""
        known, self._packs, self._pack_of = self._packs, {}, {}
        for name, _, info in sorted(self._found("experiments", ".parquet"), key=lambda found: found[0]):
            stamp = (info.mtime_ns, info.size)
            pack = known.get(name)
            if pack is None or pack.stamp != stamp:
                try:
                    pack = _Pack(info.path, pq.ParquetFile(self._files.open_input_file(info.path)), stamp)
                except (OSError, ValueError, KeyError) as error:
                    wrong = f"{info.path} is not a packed experiment ({error}): restore it from a copy, or delete it"
                    if broken is None:
                        raise ValueError(wrong) from error
                    broken[name] = wrong
                    continue
            self._packs[name] = pack
            self._pack_of.update(dict.fromkeys(pack.rows, pack))

    # Runs.

    def finished(self, broken: dict[str, str] | None = None) -> set[str]:
        """The ids of all finished runs.

        Raises:
            ValueError: if a packed experiment is damaged, unless what is broken is to be collected, by name.
        """
        # In this order, as packing writes before it deletes: a run that moves meanwhile is seen.
        found = sorted(self._found("runs", ".json", ".arrow"), key=lambda file: file[1], reverse=True)
        self._own = {name: suffix for name, suffix, _ in found}  # of a run that has both, .arrow is the newer
        self._open_packs(broken)
        return {*self._own, *self._pack_of}

    def write(
        self, specification: Specification, status: Status, rows: Sequence[Evaluation], provenance: Mapping[str, Any]
    ) -> None:
        """Keep a run that has ended, in one file."""
        name = run_id(specification)
        curves = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
        about = {"identity": name, "status": status, "specification": resolve(specification), "made": dict(provenance)}
        (columns,) = _columns(_row(about, curves))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, ROWS) as file:
            file.write_table(_row({**about, "checksum": _checksum(columns)}, curves))
        self._write(f"runs/{name}.arrow", sink.getvalue().to_pybytes())
        self.forget_checkpoint(name)

    def _loose(self, name: str) -> pa.Table | DamagedError | None:
        """A run's row from a file of its own, in this version's format or the older one."""
        old = self._own.get(name) == ".json"
        contents = self._read(f"runs/{name}.json" if old else f"runs/{name}.arrow")
        if contents is None:
            return None
        try:
            if not old:
                table = _as_rows(pa.ipc.open_file(pa.BufferReader(contents)).read_all())
            elif (curves := self._read(f"runs/{name}.parquet")) is None:
                return DamagedError(f"{name}.parquet, its curves, is missing")
            else:
                table = _row(contents.decode(), pq.ParquetFile(pa.BufferReader(curves)).read().cast(SCHEMA))
        except (OSError, ValueError, KeyError) as error:
            return DamagedError(f"it cannot be read ({error})")
        return table if table["identity"].to_pylist() == [name] else DamagedError("it is another run's")

    def _tables(self, names: Iterable[str]) -> Iterator[tuple[Sequence[str], pa.Table | DamagedError]]:
        """The rows of finished runs, some at a time, with a file of their own or packed; sorted from batch to batch."""
        ordered = sorted(names)
        for first in range(0, len(ordered), BATCH):
            batch = ordered[first : first + BATCH]
            own = [name for name in batch if name in self._own]
            found = dict(zip(own, self._each(self._loose, own), strict=True))
            tables = {name: table for name, table in found.items() if isinstance(table, pa.Table)}
            if tables:
                yield list(tables), pa.concat_tables(tables.values())
            yield from (([name], error) for name, error in found.items() if isinstance(error, DamagedError))
            packs: dict[_Pack, list[str]] = {}
            for name in batch:
                if found.get(name) is None and name in self._pack_of:  # also one that was packed just now
                    packs.setdefault(self._pack_of[name], []).append(name)
            for pack, members in packs.items():
                yield from pack.read(members)

    def _runs(self, names: Iterable[str]) -> Iterator[Run | DamagedError]:
        """Finished runs, in any order, and what is damaged."""
        for batch, table in self._tables(names):
            if isinstance(table, DamagedError):
                yield from (self._damaged(name, table) for name in batch)
                continue
            for name, text, columns in zip(batch, table["about"].to_pylist(), _curves(table), strict=True):
                try:
                    yield _run(name, text, columns)
                except DamagedError as error:
                    yield self._damaged(name, error)

    def _damaged(self, name: str, error: DamagedError) -> DamagedError:
        """The same error, with the file's name and what to do."""
        path = self._path(f"runs/{name}{self._own[name]}") if name in self._own else self._pack_of[name].path
        if error.newer:
            return DamagedError(f"{path}: run {name} cannot be read, {error}: install that version", name, newer=True)
        return DamagedError(f"{path}: run {name} is damaged, {error}: run its experiment again", name)

    def find(self, name: str) -> Run | None:
        """A run that has a file of its own, by one lookup; None if there is none, or it is damaged."""
        table = self._loose(name)
        if not isinstance(table, pa.Table):
            return None
        try:
            (columns,) = _curves(table)
            return _run(name, table["about"][0].as_py(), columns)
        except DamagedError:
            return None

    def read(self, name: str) -> Run:
        """A finished run.

        Raises:
            FileNotFoundError: if there is none with that id.
            DamagedError: if it is damaged.
        """
        if name not in self.finished():
            raise FileNotFoundError(f"{self.address} holds no finished run {name}: run its experiment first")
        (found,) = self._runs([name])
        if isinstance(found, DamagedError):
            raise found
        return found

    def runs(self, names: Iterable[str] | None = None) -> list[Run]:
        """Finished runs: those named that are there, or all; a damaged one is not, and is warned of."""
        present = self.finished()
        wanted = sorted(present) if names is None else list(names)
        found = {}
        for one in self._runs(present.intersection(wanted)):
            if isinstance(one, DamagedError):
                warnings.warn(str(one), stacklevel=2)
            else:
                found[one.run_id] = one
        return [found[name] for name in wanted if name in found]

    # A file of the driver's, by which a worker sees that both have the same storage.

    @contextmanager
    def marked(self) -> Iterator[str]:
        """Put a mark there for a while, and give its name.

        Raises:
            StorageError: if nothing can be written; so this is known before anything is started.
        """
        name = f"marks/{uuid4().hex}"
        self._write(name, b"The driver of a sweep was here.\n")
        try:
            yield name
        finally:
            self._delete(name)

    def look_for(self, mark: str) -> None:
        """Look for another process's mark.

        Raises:
            StorageError: if it is not there.
        """
        end = time.monotonic() + SEEN_WITHIN
        while self._read(mark) is None:
            if time.monotonic() > end:
                raise StorageError(
                    f"{socket.gethostname()} does not see the driver's files in {self.address}: give --storage a "
                    "folder that all machines share, or an address such as s3://bucket/path"
                )
            time.sleep(0.5)

    # Checkpoints of runs that are not finished.

    def save_checkpoint(self, name: str, checkpoint: Any) -> None:
        """Keep where a run is; the one before is replaced once this one is whole."""
        from cprop import checkpoint_files  # imports torch, which readers do not need

        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "checkpoint.pt"
            checkpoint_files.save(checkpoint, local)
            self._write(f"checkpoints/{name}.pt", local.read_bytes())

    def load_checkpoint(self, name: str) -> Any:
        """Where a run was, or None.

        Raises:
            CheckpointError: if what is kept is damaged.
        """
        contents = self._read(f"checkpoints/{name}.pt")
        if contents is None:
            return None
        from cprop import checkpoint_files

        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "checkpoint.pt"
            local.write_bytes(contents)
            return checkpoint_files.load(local)

    def forget_checkpoint(self, name: str) -> None:
        """Drop the checkpoint of a run that has ended, or that is damaged."""
        self._delete(f"checkpoints/{name}.pt")

    # Experiments.

    def write_experiment(self, name: str, manifest: Manifest) -> None:
        """Keep an experiment's manifest: which runs it consists of."""
        self._write(f"experiments/{name}.json", _text(manifest).encode())

    def experiments(self) -> dict[str, dict[str, Any]]:
        """All experiments that were run, by name and preset."""
        loose = [name for name, _, _ in self._found("experiments", ".json")]
        texts = self._each(self._read, [f"experiments/{name}.json" for name in loose])
        self._open_packs()
        found = {name: pack.about for name, pack in self._packs.items()}
        for name, text in zip(loose, texts, strict=True):
            try:
                found |= {name: json.loads(text)} if text else {}
            except ValueError as error:
                path = self._path(f"experiments/{name}.json")
                raise ValueError(f"{path} is damaged ({error}): delete it, and run the experiment again") from error
        return dict(sorted(found.items()))

    def check(self, mend: bool = False) -> list[str]:
        """Read all that is stored, and say what is damaged.

        Args:
            mend: whether to remove what is damaged, so that it is run again. What a newer version wrote is left alone.
        """
        broken: dict[str, str] = {}
        damaged = [one for one in self._runs(self.finished(broken)) if isinstance(one, DamagedError)]
        if mend:
            for name in broken:
                self._delete(f"experiments/{name}.parquet")
            lost = {one.run for one in damaged if not one.newer}
            own = lost & self._own.keys()
            for name, pack in self._packs.items():
                if bad := {run for run in lost - own if self._pack_of[run] is pack}:  # others may have a good copy
                    self._pack(name, pack.about, pack.rows.keys() - bad)
            list(self._each(self._delete_run, sorted(own)))
        return [*broken.values(), *map(str, damaged)]

    def pack(self) -> dict[str, int]:
        """Put each experiment into one Parquet file with one row per run, to commit or to pass on.

        Each file is complete: a run that experiments share is in the file of each. Runs that no experiment lists,
        such as a search for learning rates, go with the first that lists a run of their workload and optimizer; if
        there is none, they stay as they are.

        Returns:
            How many runs each file has, by the experiment's name and preset.
        """
        experiments = self.experiments()
        kinds: dict[str, tuple[str, str]] = {}
        for batch, table in self._tables(self.finished()):
            if isinstance(table, pa.Table):
                kinds |= zip(batch, map(_kind, table["about"].to_pylist()), strict=True)
        members = {
            name: set(self._packs[name].rows) & kinds.keys() if name in self._packs else set() for name in experiments
        }
        first: dict[tuple[str, str], str] = {}
        for name, about in experiments.items():
            members[name] |= kinds.keys() & {*about["runs"], *about.get("timings", ())}
            for run in members[name]:
                first.setdefault(kinds[run], name)
        for run in kinds.keys() - set().union(*members.values()):
            if kinds[run] in first:
                members[first[kinds[run]]].add(run)
        for name, about in experiments.items():
            pack = self._packs.get(name)
            # A run that also has a file of its own may be a new one in place of a damaged one.
            if (
                pack is None
                or pack.about != about
                or members[name] != set(pack.rows)
                or members[name] & self._own.keys()
            ):
                self._pack(name, about, members[name])
            self._delete(f"experiments/{name}.json")
        packed = [run for run in self._own if any(run in runs for runs in members.values())]
        list(self._each(self._delete_run, packed))
        return {name: len(runs) for name, runs in members.items()}

    def _pack(self, name: str, about: Manifest, runs: Iterable[str]) -> None:
        """Write a packed experiment, on this machine first: it may be larger than memory, and must be whole."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "packed.parquet"
            schema = ROWS.with_metadata({"experiment": _text(about)})
            # Without a dictionary, as curves hardly repeat a number.
            with pq.ParquetWriter(local, schema, compression="zstd", compression_level=9, use_dictionary=False) as file:
                for _, table in self._tables(runs):
                    if isinstance(table, pa.Table):
                        file.write_table(table.replace_schema_metadata(schema.metadata))
            self._write(f"experiments/{name}.parquet", local)

    def _delete_run(self, name: str) -> None:
        """Delete a run's own files."""
        for suffix in (".json", ".parquet", ".arrow"):
            self._delete(f"runs/{name}{suffix}")

    def local(self, folder: str) -> Path | None:
        """A folder of the store, if it lies on this machine."""
        return Path(self._root) / folder if isinstance(self._files, fs.LocalFileSystem) else None
