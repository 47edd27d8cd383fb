"""The store: one Parquet file per run with a readable specification beside it, or one per packed experiment.

A store is a folder or an address in an object store, whatever ``pyarrow`` opens. Nothing in it is a
pickle except the checkpoint of an unfinished run, which is read with ``weights_only``. Reading needs no torch.

    runs/<run id>.parquet                 the curves, one row per evaluation
    runs/<run id>.json                    the specification, how the run ended, and its provenance
    checkpoints/<run id>.pt               of a run that is not finished
    experiments/<name>-<preset>.json      an experiment's manifest: which runs belong to it
    experiments/<name>-<preset>.parquet   a packed experiment: all of these in one file, with one row per run
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from cprop_lab.run.evaluation import BINS, Evaluation, Status
from cprop_lab.run.identity import resolve, run_id
from cprop_lab.run.specification import Specification

__all__ = ["Manifest", "Run", "Store", "measured"]

Manifest = Mapping[str, Any]
"""What is stored about an experiment: its runs, and what a reader should know."""

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


@dataclass(frozen=True)
class Run:
    """A finished run: what it was, and its curves."""

    run_id: str
    specification: Specification
    status: Status
    provenance: Mapping[str, Any]
    curves: pa.Table

    def column(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A curve's values, one per evaluation; NaN where there is none."""
        values = self.curves[name].to_numpy()
        return np.asarray(values, dtype=np.float64)

    def histogram(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The scale's distribution over time: one row per evaluation, one column per bin."""
        return np.array([row or [np.nan] * BINS for row in self.curves["scale_histogram"].to_pylist()], dtype=float)


def measured(runs: Iterable[Run], column: str) -> bool:
    """Whether any run has such a curve."""
    return any(np.isfinite(run.column(column)).any() for run in runs)


class _Pack:
    """A packed experiment. Curves are read when they are needed."""

    def __init__(self, file: pq.ParquetFile, stamp: tuple[int, int]) -> None:
        self.file, self.stamp = file, stamp
        self.about: dict[str, Any] = json.loads((file.schema_arrow.metadata or {})[b"experiment"])
        self.rows = {name: row for row, name in enumerate(file.read(["identity"])["identity"].to_pylist())}

    @cached_property
    def _table(self) -> pa.Table:
        return self.file.read()

    def run(self, name: str) -> tuple[str, pa.Table]:
        """The two files of a run: its specification as text, and its curves."""
        row = self.rows[name]
        return self._table["about"][row].as_py(), pa.table({c: self._table[c][row].values for c in SCHEMA.names})


def _packed(about: Mapping[str, Any], runs: Mapping[str, tuple[str, pa.Table]]) -> bytes:
    """The file of a packed experiment."""
    texts, curves = zip(*runs.values(), strict=True) if runs else ((), (SCHEMA.empty_table(),))
    ends = np.cumsum([0, *map(len, curves)])[: len(runs) + 1]
    values = pa.concat_tables(curves).combine_chunks()
    columns = {
        c: pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values[c].combine_chunks()) for c in SCHEMA.names
    }
    table = pa.table({"identity": pa.array(runs, pa.string()), "about": pa.array(texts, pa.string()), **columns})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"experiment": _text(about)}),
        sink,
        row_group_size=1_000,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,  # curves hardly repeat a number
    )
    contents: bytes = sink.getvalue().to_pybytes()
    return contents


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(dict(about), indent=2) + "\n"


def _kind(text: str) -> tuple[str, str]:
    """The workload and the optimizer of a run."""
    specification = json.loads(text)["specification"]
    return specification["workload"], specification["optimizer"]


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
        self._files, self._root = fs.FileSystem.from_uri(text)
        self._packs: dict[str, _Pack] = {}
        self._pack_of: dict[str, _Pack] = {}

    # Files that are there as a whole or not at all, on a disk and in an object store.

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, contents: bytes) -> None:
        path = self._path(name)
        folder, _, last = path.rpartition("/")
        self._files.create_dir(folder)
        aside = f"{folder}/.{uuid4().hex}-{last}"
        with self._files.open_output_stream(aside) as stream:
            stream.write(contents)
        self._files.move(aside, path)

    def _read(self, name: str) -> bytes | None:
        try:
            with self._files.open_input_file(self._path(name)) as stream:
                contents: bytes = stream.read()
                return contents
        except FileNotFoundError:
            return None

    def _found(self, folder: str, suffix: str) -> Iterator[tuple[str, fs.FileInfo]]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        for info in self._files.get_file_info(selector):
            if info.base_name.endswith(suffix) and not info.base_name.startswith("."):
                yield info.base_name.removesuffix(suffix), info

    def _names(self, folder: str, suffix: str) -> set[str]:
        return {name for name, _ in self._found(folder, suffix)}

    def _delete(self, name: str) -> None:
        path = self._path(name)
        if self._files.get_file_info(path).type != fs.FileType.NotFound:
            self._files.delete_file(path)

    def _open_packs(self) -> None:
        """Find the packed experiments; those that have not changed stay open."""
        known, self._packs, self._pack_of = self._packs, {}, {}
        for name, info in sorted(self._found("experiments", ".parquet")):
            stamp = (info.mtime_ns, info.size)
            pack = known.get(name)
            if pack is None or pack.stamp != stamp:
                try:
                    pack = _Pack(pq.ParquetFile(self._files.open_input_file(info.path)), stamp)
                except (pa.ArrowInvalid, KeyError) as error:
                    raise ValueError(
                        f"{info.path} is not a packed experiment ({error}): restore it from a copy, or delete it"
                    ) from error
            self._packs[name] = pack
            self._pack_of.update(dict.fromkeys(pack.rows, pack))

    # Runs.

    def finished(self) -> set[str]:
        """The ids of all finished runs."""
        # In this order, as packing writes before it deletes: a run that moves meanwhile is seen.
        loose = self._names("runs", ".json")
        self._open_packs()
        return loose.union(self._pack_of)

    def has(self, name: str) -> bool:
        """Whether a run is finished: one look at its file, and only without one at the packed experiments."""
        if self._files.get_file_info(self._path(f"runs/{name}.json")).type == fs.FileType.File:
            return True
        self._open_packs()
        return name in self._pack_of

    def write(
        self, specification: Specification, status: Status, rows: Sequence[Evaluation], provenance: Mapping[str, Any]
    ) -> None:
        """Keep a run that has ended. The specification comes last: where it is, the curves are."""
        name = run_id(specification)
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA), buffer)
        self._write(f"runs/{name}.parquet", buffer.getvalue().to_pybytes())
        about = {
            "identity": name,
            "status": status,
            "specification": resolve(specification),
            "made": dict(provenance),
        }
        self._write(f"runs/{name}.json", _text(about).encode())
        self.forget_checkpoint(name)

    def _run(self, name: str) -> tuple[str, pa.Table] | None:
        """The two files of a run, packed or not."""
        if name not in self._pack_of:
            about, curves = self._read(f"runs/{name}.json"), self._read(f"runs/{name}.parquet")
            if about is not None and curves is not None:
                return about.decode(), pq.read_table(pa.BufferReader(curves))
            self._open_packs()
        return self._pack_of[name].run(name) if name in self._pack_of else None

    def read(self, name: str) -> Run:
        """A finished run.

        Raises:
            FileNotFoundError: if there is none with that id.
        """
        found = self._run(name)
        if found is None:
            raise FileNotFoundError(f"{self.address} holds no finished run {name}: run its experiment first")
        content = json.loads(found[0])
        values = {k: v for k, v in content["specification"].items() if k not in ("numerics", "code")}
        return Run(name, Specification(**values), content["status"], content["made"], found[1])

    def runs(self, names: Iterable[str] | None = None) -> list[Run]:
        """Finished runs: those named that are there, or all."""
        present = self.finished()
        return [self.read(name) for name in (sorted(present) if names is None else names) if name in present]

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
        loose = {name: self._read(f"experiments/{name}.json") for name in self._names("experiments", ".json")}
        self._open_packs()
        packed = {name: pack.about for name, pack in self._packs.items()}
        return dict(sorted((packed | {name: json.loads(text) for name, text in loose.items() if text}).items()))

    def pack(self) -> dict[str, int]:
        """Put each experiment into one Parquet file with one row per run, to commit or to pass on.

        Each file is complete: a run that experiments share is in the file of each. Runs that no experiment lists,
        such as a search for learning rates, go with the first that lists a run of their workload and optimizer; if
        there is none, they stay as they are.

        Returns:
            How many runs each file has, by the experiment's name and preset.
        """
        experiments = self.experiments()
        files = {name: found for name in self.finished() if (found := self._run(name))}
        kinds = {name: _kind(text) for name, (text, _) in files.items()}
        members = {name: set(self._packs[name].rows) if name in self._packs else set() for name in experiments}
        first: dict[tuple[str, str], str] = {}
        for name, about in experiments.items():
            members[name] |= files.keys() & {*about["runs"], *about.get("timings", ())}
            for run in members[name]:
                first.setdefault(kinds[run], name)
        for run in files.keys() - set().union(*members.values()):
            if kinds[run] in first:
                members[first[kinds[run]]].add(run)
        for name, about in experiments.items():
            if (
                name not in self._packs
                or self._packs[name].about != about
                or members[name] != set(self._packs[name].rows)
            ):
                runs = {run: files[run] for run in sorted(members[name])}
                self._write(f"experiments/{name}.parquet", _packed(about, runs))
            self._delete(f"experiments/{name}.json")
        for run in self._names("runs", ".json") & set().union(*members.values()):
            self._delete(f"runs/{run}.json")
            self._delete(f"runs/{run}.parquet")
        return {name: len(runs) for name, runs in members.items()}

    def local(self, folder: str) -> Path | None:
        """A folder of the store, if it lies on this machine."""
        return Path(self._root) / folder if isinstance(self._files, fs.LocalFileSystem) else None
