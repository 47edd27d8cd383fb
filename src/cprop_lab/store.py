"""The store: one Parquet file per run, with a readable specification beside it, and nothing else.

A store is a folder or an address in an object store, whatever ``pyarrow`` opens. Nothing in it is a
pickle except the checkpoint of an unfinished run, which is read with ``weights_only``. Reading needs no torch.

    runs/<run id>.parquet              the curves, one row per evaluation
    runs/<run id>.json                 the specification, how the run ended, and its provenance
    checkpoints/<run id>.pt            of a run that is not finished
    experiments/<name>-<preset>.json   an experiment's manifest: which runs belong to it
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    def _names(self, folder: str, suffix: str) -> Iterator[str]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        for info in self._files.get_file_info(selector):
            if info.base_name.endswith(suffix) and not info.base_name.startswith("."):
                yield info.base_name.removesuffix(suffix)

    # Runs.

    def finished(self) -> set[str]:
        """The ids of all finished runs."""
        return set(self._names("runs", ".json"))

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
        self._write(f"runs/{name}.json", (json.dumps(about, indent=2) + "\n").encode())
        self.forget_checkpoint(name)

    def read(self, name: str) -> Run:
        """A finished run.

        Raises:
            FileNotFoundError: if there is none with that id.
        """
        about, curves = self._read(f"runs/{name}.json"), self._read(f"runs/{name}.parquet")
        if about is None or curves is None:
            raise FileNotFoundError(f"{self.address} holds no finished run {name}: run its experiment first")
        content = json.loads(about)
        values = {k: v for k, v in content["specification"].items() if k not in ("numerics", "code")}
        specification = Specification(**values)
        return Run(name, specification, content["status"], content["made"], pq.read_table(pa.BufferReader(curves)))

    def runs(self, names: Iterable[str] | None = None) -> list[Run]:
        """Finished runs: those named that are there, or all."""
        present = self.finished()
        return [self.read(name) for name in (sorted(present) if names is None else names) if name in present]

    # Checkpoints of runs that are not finished.

    def save_checkpoint(self, name: str, checkpoint: Any) -> None:
        """Keep where a run is; the one before is replaced once this one is whole."""
        from cprop import files  # imports torch, which readers do not need

        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "checkpoint.pt"
            files.save(checkpoint, local)
            self._write(f"checkpoints/{name}.pt", local.read_bytes())

    def load_checkpoint(self, name: str) -> Any:
        """Where a run was, or None.

        Raises:
            CheckpointError: if what is kept is damaged.
        """
        contents = self._read(f"checkpoints/{name}.pt")
        if contents is None:
            return None
        from cprop import files

        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "checkpoint.pt"
            local.write_bytes(contents)
            return files.load(local)

    def forget_checkpoint(self, name: str) -> None:
        """Drop the checkpoint of a run that has ended, or that is damaged."""
        path = self._path(f"checkpoints/{name}.pt")
        if self._files.get_file_info(path).type != fs.FileType.NotFound:
            self._files.delete_file(path)

    # Experiments.

    def write_experiment(self, name: str, manifest: Manifest) -> None:
        """Keep an experiment's manifest: which runs it consists of."""
        self._write(f"experiments/{name}.json", (json.dumps(dict(manifest), indent=2) + "\n").encode())

    def experiments(self) -> dict[str, dict[str, Any]]:
        """All experiments that were run, by name and preset."""
        found = sorted(self._names("experiments", ".json"))
        return {name: json.loads(self._read(f"experiments/{name}.json") or b"{}") for name in found}

    def remove_folder(self, name: str) -> None:
        """Drop a folder that is not the store's own."""
        if self._files.get_file_info(self._path(name)).type == fs.FileType.Directory:
            self._files.delete_dir(self._path(name))

    def local(self, folder: str) -> Path | None:
        """A folder of the store, if it lies on this machine."""
        return Path(self._root) / folder if isinstance(self._files, fs.LocalFileSystem) else None
