"""Atomic checkpoint files, verified before they are loaded.

``torch.save`` writes in place, so a run killed while saving leaves a truncated file. ``torch.load``
does not check the file's checksums, so a flipped bit in storage ends up in the weights. Files
written here are ordinary ``torch.save`` files, and any such file can be loaded here. Folders, as
written by ``torch.distributed.checkpoint``, are sealed with the digests of their files.
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
    """Write a checkpoint atomically, in the format of ``torch.save``.

    Args:
        checkpoint: anything that ``torch.load(..., weights_only=True)`` can read: state dicts, tensors, numbers,
            strings.
        path: the file to write; an existing file is kept until the new one is complete.

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
    """Load a file written by :func:`save` or ``torch.save``, after verifying its checksums and without running code.

    Raises:
        CheckpointError: if the file is truncated or damaged, or contains anything but data.
        FileNotFoundError: if there is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged index can raise almost any exception in zipfile
        raise CheckpointError(
            f"{os.fspath(path)} is not a checkpoint, or is truncated ({error}): use an older one"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{os.fspath(path)} is damaged at {damaged!r}: use an older one")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise CheckpointError(
            f"{os.fspath(path)} was not loaded: it contains {', '.join(unknown) or 'unknown objects'}, which could "
            "run code. If you trust it, import the package that defines them, which may register them as data, or "
            f"pass them to torch.serialization.add_safe_globals ({error})"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read ({type(error).__name__}: {error})") from error


def share(folder: Path, rank: int, world: int) -> list[Path]:
    """A rank's share of the files in a folder: each file belongs to one rank."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not is_seal(path))
    return files[rank::world]


def is_seal(path: Path) -> bool:
    """Whether a file was written by :func:`seal`."""
    return path.name.startswith("sha256-") and path.suffix == ".json"


def seal(folder: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
    """Save the digests of a folder's files, to be checked by :func:`verify`.

    Call it on every rank, after all ranks have finished writing; each seals its share of the files.
    """
    root = Path(folder)
    digests = {path.relative_to(root).as_posix(): digest(path) for path in share(root, rank, world)}
    with (root / _SEAL.format(rank=rank)).open("w") as file:
        json.dump({"world": world, "files": digests}, file)
        file.flush()
        os.fsync(file.fileno())


def verify(folder: str | os.PathLike[str], rank: int = 0, world: int = 1) -> None:
    """Verify a rank's share of a sealed folder; the number of ranks may differ from :func:`seal`'s.

    Raises:
        CheckpointError: if a file was changed, removed or added, or the seal is incomplete.
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
        raise CheckpointError(f"{root} is not sealed by all ranks, so it is incomplete: use an older checkpoint")
    present = {path.relative_to(root).as_posix() for path in share(root, 0, 1)}
    if present != set(sealed):
        raise CheckpointError(
            f"{root} should contain {sorted(sealed)} but contains {sorted(present)}: use an older checkpoint"
        )
    for path in share(root, rank, world):
        if digest(path) != sealed[path.relative_to(root).as_posix()]:
            raise CheckpointError(f"{path} is damaged: use an older checkpoint")


def digest(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
