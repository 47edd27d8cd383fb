"""Checkpoint files that are whole or not there: written aside and moved, verified before they are read.

``torch.save`` writes in place, and ``torch.load`` does not look at the checksums that the file
holds: a run that is killed while saving leaves half a file, and a bit that flipped in storage goes
into the weights. A file written here is an ordinary file of ``torch.save``, and any such file can be
read here. A folder, such as ``torch.distributed.checkpoint`` writes, is sealed with the digests of
its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from cprop.checkpoint import CheckpointError

__all__ = ["load", "save", "seal", "verify"]

_SEAL: Final = "sha256-{rank}.json"


def save(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as ``torch.save`` does, so that the file is there as a whole or not at all.

    Args:
        checkpoint: what ``torch.load(..., weights_only=True)`` can read: state dicts, tensors, numbers, strings.
        path: where to; an older file there stays until the new one is complete.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"step": 3, "w": torch.ones(2)}, Path(folder) / "last.pt")
        ...     load(Path(folder) / "last.pt")
        {'step': 3, 'w': tensor([1., 1.])}
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read a file of :func:`save` or ``torch.save``, if its checksums hold and it runs no code.

    Raises:
        CheckpointError: if the file is cut short or changed, or holds anything but data.
        FileNotFoundError: if there is none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # zipfile has many: a damaged index may say anything
        raise CheckpointError(
            f"{os.fspath(path)} is no checkpoint, or cut short ({error}): use an older one"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{os.fspath(path)} is damaged at {damaged!r}: use an older one")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise CheckpointError(
            f"{os.fspath(path)} was not read: it holds {', '.join(unknown) or 'what torch does not know'}, which could "
            "run code. If you trust it, import the package that these come from, which may register them as data, or "
            f"name them to torch.serialization.add_safe_globals ({error})"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read ({type(error).__name__}: {error})") from error


def share(folder: Path, rank: int, world: int) -> list[Path]:
    """The files of a folder that a rank looks after: each file is some rank's."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not is_seal(path))
    return files[rank::world]


def is_seal(path: Path) -> bool:
    """Whether a file is one of :func:`seal`'s own."""
    return path.name.startswith("sha256-") and path.suffix == ".json"


def seal(folder: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
    """Write down the digests of a folder's files, to be checked by :func:`verify`.

    Every rank calls it, once all of them have written; each seals its share of the files.
    """
    root = Path(folder)
    digests = {path.relative_to(root).as_posix(): digest(path) for path in share(root, rank, world)}
    with (root / _SEAL.format(rank=rank)).open("w") as file:
        json.dump({"world": world, "files": digests}, file)
        file.flush()
        os.fsync(file.fileno())


def verify(folder: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
    """Check a rank's share of a sealed folder, by any number of ranks.

    Raises:
        CheckpointError: if a file was changed, is missing, or was added, or the seal itself is not complete.
    """
    root = Path(folder)
    sealed: dict[str, str] = {}
    try:
        seals = [json.loads(path.read_text()) for path in sorted(root.glob("sha256-*.json"))]
        for part in seals:
            sealed |= part["files"]
        complete = bool(seals) and all(part["world"] == len(seals) for part in seals)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"the seal of {root} cannot be read ({error}): use an older checkpoint") from error
    if not complete:
        raise CheckpointError(f"{root} is not sealed by all ranks: it was not finished; use an older checkpoint")
    present = {path.relative_to(root).as_posix() for path in share(root, 0, 1)}
    if present != set(sealed):
        raise CheckpointError(
            f"{root} should hold {sorted(sealed)} and holds {sorted(present)}: use an older checkpoint"
        )
    for path in share(root, rank, world):
        if digest(path) != sealed[path.relative_to(root).as_posix()]:
            raise CheckpointError(f"{path} is damaged: use an older checkpoint")


def digest(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
