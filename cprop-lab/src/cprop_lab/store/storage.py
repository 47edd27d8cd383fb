"""Where runs are kept: files that are there as a whole or not at all, on a disk and in an object store."""

from __future__ import annotations

import io
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlparse
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cprop_lab.run.evaluation import Evaluation, Status
from cprop_lab.run.identity import resolve, run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store.rows import (
    ROWS,
    DamagedError,
    Pack,
    Rows,
    Run,
    as_rows,
    kind_of,
    manifest_of,
    manifest_text,
    one_line,
    runs_of,
    to_row,
)

__all__ = ["Manifest", "StorageError", "Store"]

Manifest = Mapping[str, Any]
"""What is stored about an experiment: its runs, and what a reader should know."""

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH: Final = 1_000
"""Runs that are read, or written to a packed experiment, at a time."""

ATOMIC: Final = ("s3", "gcs", "abfs")
"""Kinds of storage where a file that is written is there as a whole, or not at all."""

CONNECTIONS: Final = 32
"""Files that are read at the same time from storage that is not a disk: most of the time goes into waiting."""


ASIDE: Final = "damaged"
"""The folder of what was damaged; nothing reads it."""

MARKED_FOR: Final = 30 * 24 * 3600.0
"""Seconds after which a mark is deleted, in case its driver was killed."""

SEEN_WITHIN: Final = 5.0
"""Seconds after which what one machine has written is seen by all."""


class StorageError(OSError):
    """The storage cannot be used: it is full, read-only, or not shared."""


def _sync(path: str) -> None:
    """Have a file or a folder written to the disk, so that it survives a power failure."""
    with suppress(PermissionError):  # a folder that may be written and not read
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _again(error: DamagedError, what: str = "its experiment") -> str:
    """What is said of a damaged run; one of a newer version says itself what to do."""
    return str(error) if error.newer else f"{error}: run {what} again"


def _members(about: Manifest) -> list[str]:
    """The runs that an experiment's manifest lists."""
    return [*about["runs"], *about.get("timings", ())]


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
        self._own: set[str] = set()  # runs with a file of their own
        self._packs: dict[str, Pack] = {}
        self._broken: dict[str, str] = {}  # packed experiments that cannot be opened, and what is wrong with each
        self._pack_of: dict[str, Pack] = {}

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

    def _found(self, folder: str, suffix: str) -> Iterator[tuple[str, fs.FileInfo]]:
        """The files of a folder, by name; those that are being written are left out."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        for info in self._files.get_file_info(selector):
            name = info.base_name.removesuffix(suffix)
            if name != info.base_name and not name.startswith("."):
                yield name, info

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._path(name))

    def _set_aside(self, name: str) -> None:
        """Move a file to where nothing reads it."""
        folder = f"{ASIDE}/{name}".rpartition("/")[0]
        self._files.create_dir(self._path(folder))
        with suppress(FileNotFoundError):
            self._files.move(self._path(name), self._path(f"{ASIDE}/{name}"))

    def _open_packs(self) -> None:
        """Find the packed experiments; those that have not changed stay open."""
        known, self._packs, self._pack_of, self._broken = self._packs, {}, {}, {}
        for name, info in sorted(self._found("experiments", ".parquet"), key=lambda found: found[0]):
            stamp = (info.mtime_ns, info.size)
            pack = known.get(name)
            if pack is None or pack.stamp != stamp:
                try:
                    opened = self._files.open_input_file(info.path)
                    pack = Pack(info.path, pq.ParquetFile(opened, page_checksum_verification=True), stamp)
                except Exception as error:  # pyarrow raises a dozen kinds for damaged bytes
                    self._broken[name] = f"{info.path} is not a packed experiment ({one_line(error)})"
                    continue
            self._packs[name] = pack
            self._pack_of.update(dict.fromkeys(pack.rows, pack))

    # Runs.

    def empty(self) -> bool:
        """Whether nothing is stored, neither whole nor damaged."""
        return not self.finished() and not self._broken and not self._manifests()

    def finished(self) -> set[str]:
        """The ids of all finished runs; what is stored of one may be damaged."""
        # In this order, as packing writes before it deletes: a run that moves meanwhile is seen.
        self._own = {name for name, _ in self._found("runs", ".arrow")}
        self._open_packs()
        return {*self._own, *self._pack_of}

    def write(
        self, specification: Specification, status: Status, rows: Sequence[Evaluation], provenance: Mapping[str, Any]
    ) -> None:
        """Keep a run that has ended, in one file."""
        name = run_id(specification)
        about = {"identity": name, "status": status, "specification": resolve(specification), "made": dict(provenance)}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, ROWS) as file:
            file.write_table(to_row(about, rows))
        self._write(f"runs/{name}.arrow", sink.getvalue().to_pybytes())
        self.forget_checkpoint(name)

    def _loose(self, name: str) -> pa.Table | DamagedError | None:
        """A run's row from a file of its own."""
        contents = self._read(f"runs/{name}.arrow")
        if contents is None:
            return None
        try:
            table = as_rows(pa.ipc.open_file(pa.BufferReader(contents)).read_all())
            table.validate(full=True)  # else damaged offsets may point anywhere in memory
            return table if table["identity"].to_pylist() == [name] else DamagedError("it is another run's")
        except Exception as error:  # pyarrow raises a dozen kinds for damaged bytes
            return DamagedError(f"it cannot be read ({one_line(error)})")

    def _tables(self, names: Iterable[str]) -> Iterator[Rows]:
        """The rows of finished runs, some at a time, with a file of their own or packed; sorted from batch to batch."""
        ordered = sorted(names)
        for first in range(0, len(ordered), BATCH):
            batch = ordered[first : first + BATCH]
            own = [name for name in batch if name in self._own]
            found = dict(zip(own, self._each(self._loose, own), strict=True))
            tables = {name: table for name, table in found.items() if isinstance(table, pa.Table)}
            if tables:
                yield list(tables), pa.concat_tables(tables.values()), None
            yield from (([name], error, None) for name, error in found.items() if isinstance(error, DamagedError))
            packs: dict[Pack, list[str]] = {}
            for name in batch:
                if found.get(name) is None and name in self._pack_of:  # also one that was packed just now
                    packs.setdefault(self._pack_of[name], []).append(name)
            for pack, members in packs.items():
                yield from pack.read(members)

    def _from(self, rows: Iterable[Rows]) -> Iterator[Run | DamagedError]:
        """The runs of rows, in any order, and what is damaged, with the file's name."""
        for names, table, pack in rows:
            found = [table] * len(names) if isinstance(table, DamagedError) else runs_of(names, table)
            for name, one in zip(names, found, strict=True):
                if isinstance(one, Run):
                    yield one
                    continue
                path = self._path(f"runs/{name}.arrow") if pack is None else pack.path
                wrong = f"cannot be read, {one}: install that version" if one.newer else f"is damaged, {one}"
                yield DamagedError(f"{path}: run {name} {wrong}", name, one.newer)

    def _runs(self, names: Iterable[str]) -> Iterator[Run | DamagedError]:
        """Finished runs, in any order, each from a copy that is whole; what is damaged, if there is none."""
        damaged: dict[str, DamagedError] = {}
        for one in self._from(self._tables(names)):
            if isinstance(one, Run):
                yield one
            else:
                damaged[one.run] = one
        for pack in self._packs.values() if damaged else ():
            for one in self._from(pack.read(damaged.keys() & pack.rows.keys())):
                if isinstance(one, Run):
                    del damaged[one.run_id]
                    yield one
        yield from damaged.values()

    def find(self, name: str) -> Run | None:
        """A run that has a file of its own, by one lookup; None if there is none, or it is damaged."""
        table = self._loose(name)
        if not isinstance(table, pa.Table):
            return None
        (found,) = runs_of([name], table)
        return found if isinstance(found, Run) else None

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
            raise DamagedError(_again(found), name, found.newer)
        return found

    def runs(self, names: Iterable[str] | None = None) -> list[Run]:
        """Finished runs: those named that are there, or all; what is damaged is left out, and warned of."""
        present = self.finished()
        for wrong in self._damaged_files():
            warnings.warn(wrong, stacklevel=2)
        wanted = sorted(present) if names is None else list(names)
        found = {}
        for one in self._runs(present.intersection(wanted)):
            if isinstance(one, DamagedError):
                warnings.warn(_again(one), stacklevel=2)
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
        for info in self._files.get_file_info(fs.FileSelector(self._path("marks"), allow_not_found=True)):
            if info.mtime_ns is not None and time.time() - info.mtime_ns / 1e9 > MARKED_FOR:
                self._delete(f"marks/{info.base_name}")
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
        self._write(f"experiments/{name}.json", manifest_text(manifest).encode())

    def _manifests(self) -> dict[str, dict[str, Any] | DamagedError]:
        """The manifests that have a file of their own, and those that are damaged."""
        loose = [name for name, _ in self._found("experiments", ".json")]
        found: dict[str, dict[str, Any] | DamagedError] = {}
        for name, text in zip(loose, self._each(self._read, [f"experiments/{n}.json" for n in loose]), strict=True):
            try:
                found |= {} if text is None else {name: manifest_of(text)}
            except DamagedError as error:
                path = self._path(f"experiments/{name}.json")
                found[name] = DamagedError(f"{path}: a manifest is damaged, {error}: run {name} again")
        return found

    def _experiments(self, manifests: Mapping[str, dict[str, Any] | DamagedError]) -> dict[str, dict[str, Any]]:
        packed = {name: pack.about for name, pack in self._packs.items() if pack.about is not None}
        whole = {name: about for name, about in manifests.items() if not isinstance(about, DamagedError)}
        return dict(sorted((packed | whole).items()))

    def experiments(self) -> dict[str, dict[str, Any]]:
        """All experiments that were run, by name and preset; a damaged manifest is left out, and warned of."""
        self._open_packs()
        manifests = self._manifests()
        for error in manifests.values():
            if isinstance(error, DamagedError):
                warnings.warn(str(error), stacklevel=2)
        return self._experiments(manifests)

    def _damaged_files(self) -> Iterator[str]:
        """What is wrong with packed experiments, beside the runs that are known to be in them."""
        for name, wrong in self._broken.items():
            yield f"{wrong}: restore it from a copy, or run {name} again"
        for name, pack in self._packs.items():
            missing = set(_members(pack.about or {"runs": ()})) - self._own - self._pack_of.keys()
            lost = f", of which these are not stored: {', '.join(sorted(missing))}" * bool(missing)
            yield from (f"{pack.path}: {wrong}: run {name} again{lost}" for wrong in pack.wrong)

    def check(self, mend: bool = False) -> list[str]:
        """Read all that is stored, every copy, and say what is damaged and which runs it costs.

        Args:
            mend: whether to set aside what is damaged, in the folder :data:`ASIDE`, so that it is run again. What a
                newer version wrote is left alone.
        """
        self.finished()
        manifests = self._manifests()
        whole: set[str] = set()
        damaged: dict[Pack | None, list[DamagedError]] = {}

        def read(pack: Pack | None, rows: Iterable[Rows]) -> None:
            for one in self._from(rows):
                if isinstance(one, Run):
                    whole.add(one.run_id)
                else:
                    damaged.setdefault(pack, []).append(one)

        read(None, (rows for rows in self._tables(self._own) if rows[2] is None))
        for pack in self._packs.values():
            read(pack, pack.read(pack.rows))
        experiments = self._experiments(manifests)
        said = [str(error) for error in manifests.values() if isinstance(error, DamagedError)]
        said += self._damaged_files()
        listed = {run: name for name, about in experiments.items() for run in _members(about)}
        for one in (one for errors in damaged.values() for one in errors):
            copy = f"{one}: another copy of it is whole"
            said.append(copy if one.run in whole else _again(one, listed.get(one.run, "its experiment")))
        if mend:
            for name, about in manifests.items():
                if isinstance(about, DamagedError):
                    self._set_aside(f"experiments/{name}.json")
            for name in self._broken:
                self._set_aside(f"experiments/{name}.parquet")
            for name, pack in self._packs.items():
                bad = {one.run for one in damaged.get(pack, ()) if not one.newer}
                if bad or pack.wrong:
                    file = f"experiments/{name}.parquet"
                    self._files.create_dir(self._path(f"{ASIDE}/experiments"))
                    self._files.copy_file(self._path(file), self._path(f"{ASIDE}/{file}"))
                    self._pack(name, pack.about, pack.read(pack.rows.keys() - bad))
            for one in damaged.get(None, ()):
                if not one.newer:
                    self._set_aside(f"runs/{one.run}.arrow")
        return said

    def pack(self) -> dict[str, int]:
        """Put each experiment into one Parquet file with one row per run, to commit or to pass on.

        Each file is complete: a run that experiments share is in the file of each. Runs that no experiment lists,
        such as a search for learning rates, go with the first that lists a run of their workload and optimizer; if
        there is none, they stay as they are.

        Returns:
            How many runs each file has, by the experiment's name and preset.

        Raises:
            DamagedError: if something is damaged, as a damaged copy of a run might replace one that is whole.
        """
        present = self.finished()
        manifests = self._manifests()
        kinds: dict[str, tuple[str, str]] = {}
        wrong = [*map(str, (one for one in manifests.values() if isinstance(one, DamagedError)))]
        wrong += self._damaged_files()
        for rows in self._tables(present):
            wrong += [str(one) for one in self._from([rows]) if isinstance(one, DamagedError) and not one.newer]
            if wrong:
                raise DamagedError(f"{wrong[0]}; before packing, set it aside: cprop-lab check --mend")
            kinds |= zip(rows[0], kind_of(rows[1]), strict=True)
        experiments = self._experiments(manifests)
        members = {
            name: set(self._packs[name].rows) & kinds.keys() if name in self._packs else set() for name in experiments
        }
        first: dict[tuple[str, str], str] = {}
        for name, about in experiments.items():
            members[name] |= kinds.keys() & set(_members(about))
            for run in members[name]:
                first.setdefault(kinds[run], name)
        for run in kinds.keys() - set().union(*members.values()):
            if kinds[run] in first:
                members[first[kinds[run]]].add(run)
        for name, about in experiments.items():
            pack = self._packs.get(name)
            # A run that also has a file of its own may be a new one in place of a damaged one.
            if pack is None or pack.about != about or members[name] != set(pack.rows) or members[name] & self._own:
                self._pack(name, about, self._tables(members[name]))
            self._delete(f"experiments/{name}.json")
        packed = [f"runs/{run}.arrow" for run in self._own if any(run in runs for runs in members.values())]
        list(self._each(self._delete, packed))
        return {name: len(runs) for name, runs in members.items()}

    def _pack(self, name: str, about: Manifest | None, rows: Iterable[Rows]) -> None:
        """Write a packed experiment, on this machine first: it may be larger than memory, and must be whole."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "packed.parquet"
            schema = ROWS.with_metadata({} if about is None else {"experiment": manifest_text(about)})
            # Without a dictionary, as curves hardly repeat a number.
            how = {"compression": "zstd", "compression_level": 9, "use_dictionary": False, "write_page_checksum": True}
            with pq.ParquetWriter(local, schema, **how) as file:
                for _, table, _ in rows:
                    if isinstance(table, pa.Table):
                        file.write_table(table.replace_schema_metadata(schema.metadata))
            self._write(f"experiments/{name}.parquet", local)

    def local(self, folder: str) -> Path | None:
        """A folder of the store, if it lies on this machine."""
        return Path(self._root) / folder if isinstance(self._files, fs.LocalFileSystem) else None
