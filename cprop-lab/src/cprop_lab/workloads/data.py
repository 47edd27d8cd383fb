"""The paper's data sets, read with ``datasets`` by their public names or from a folder, decoded once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["ENVIRONMENT", "Source", "images", "text", "vocabulary"]

ENVIRONMENT: Final = "CPROP_LAB_DATA"
"""The environment variable that names a folder of data sets; without it, the public names are used."""


class Source(NamedTuple):
    """A data set: its folder's name, its public name and version, and what its columns and splits are called."""

    folder: str
    public: str
    image: str = "image"
    label: str = "label"
    test: str = "test"
    revision: str | None = None

    def address(self) -> str:
        """What ``datasets.load_dataset`` is given.

        Raises:
            FileNotFoundError: if a data folder is named, and this data set is not in it.
        """
        root = os.environ.get(ENVIRONMENT)
        if not root:
            return self.public
        path = Path(root) / self.folder
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is not there: {ENVIRONMENT} (or --data) names a folder that holds {self.folder}/; "
                f"without it, {self.public!r} is downloaded"
            )
        return str(path)


FASHION_MNIST: Final = Source("fashion_mnist", "zalando-datasets/fashion_mnist")
CIFAR100: Final = Source("cifar100", "uoft-cs/cifar100", image="img", label="fine_label")
TINY_IMAGENET: Final = Source("tiny_imagenet", "zh-plus/tiny-imagenet", test="valid")
# The public one is made by a script, which `datasets` runs no more; this is where its rows were converted to.
PENN_TREEBANK: Final = Source("penn_treebank", "ptb-text-only/ptb_text_only", revision="refs/convert/parquet")


def images(source: Source, training: bool, channels: int) -> tuple[Tensor, Tensor]:
    """Images as bytes (number, channels, height, width), and their labels; small enough to stay in memory.

    Decoding takes longer than a short run, so what was decoded is kept in a file, which all processes of a machine map
    into memory.
    """
    return _images(source, source.address(), training, channels)


def _rows(source: Source, address: str, split: str) -> Any:
    """A split of a data set, from a folder or the network.

    Raises:
        ConnectionError: if it is to be downloaded and cannot be.
    """
    cache_folder()  # first, as it may say where `datasets` is to keep its own
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    revision = None if Path(address).is_dir() else source.revision
    try:
        return load_dataset(address, split=split, revision=revision)
    except ConnectionError as error:
        raise ConnectionError(
            f"{address!r} cannot be downloaded ({error}): give --data FOLDER, which holds {source.folder}/"
        ) from error


@cache
def _images(source: Source, address: str, training: bool, channels: int) -> tuple[Tensor, Tensor]:
    # A local folder's validation split is called "validation", whatever its file is called.
    test = "validation" if source.test == "valid" and Path(address).is_dir() else source.test
    rows = _rows(source, address, "train" if training else test)
    key = hashlib.sha256(f"{rows._fingerprint} {channels}".encode()).hexdigest()[:16]
    cached = cache_folder() / f"{source.folder}-{key}.npy"
    labels = torch.tensor(rows[source.label][:], dtype=torch.long)
    if not cached.exists():
        mode = "L" if channels == 1 else "RGB"
        decoded = np.stack([np.asarray(row[source.image].convert(mode)) for row in rows.select_columns(source.image)])
        write_aside(cached, decoded.reshape(len(rows), *decoded.shape[1:3], channels).transpose(0, 3, 1, 2))
    # Mapped copy-on-write: torch wants memory that it may write to, and one copy serves all processes.
    return torch.from_numpy(np.load(cached, mmap_mode="c")), labels


def cache_folder() -> Path:
    """Where decoded data are kept: beside other caches of the user, or with temporary files if that cannot be written.

    Raises:
        PermissionError: if the folder for temporary files has one of that name, and it is another user's.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cprop-lab"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"cprop-lab-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's: set XDG_CACHE_HOME to a folder that you can write to")
    os.environ.setdefault("HF_HOME", str(folder / "huggingface"))  # where `datasets` keeps its own
    return folder


def write_aside(path: Path, array: np.ndarray) -> None:
    """Write an array so that it is there as a whole or not at all: several processes may do so at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as file:
        np.save(file, np.ascontiguousarray(array))
    Path(file.name).replace(path)


@cache
def _sentences(source: Source, address: str, training: bool) -> list[str]:
    split = "train" if training else source.test
    if Path(address).is_dir():
        return (Path(address) / f"ptb.{split}.txt").read_text().splitlines()
    return list(_rows(source, address, split)["sentence"])


def text(source: Source, training: bool) -> tuple[Tensor, list[str]]:
    """A text as one long row of word numbers, and the training text's words; ``<eos>`` ends a sentence."""
    words = vocabulary(source)
    number = {word: i for i, word in enumerate(words)}
    sentences = _sentences(source, source.address(), training)
    tokens = [number[word] for sentence in sentences for word in [*sentence.split(), "<eos>"]]
    return torch.tensor(tokens, dtype=torch.long), words


def vocabulary(source: Source) -> list[str]:
    """The training text's words, in alphabetical order."""
    return _vocabulary(source, source.address())


@cache
def _vocabulary(source: Source, address: str) -> list[str]:
    return sorted({"<eos>", *(word for sentence in _sentences(source, address, True) for word in sentence.split())})


def characters(source: Source, training: bool) -> Tensor:
    """A text as one long row of character numbers; a line break ends a sentence."""
    number = {character: i for i, character in enumerate(alphabet(source))}
    text = "".join(f"{sentence.strip()}\n" for sentence in _sentences(source, source.address(), training))
    return torch.tensor([number[character] for character in text], dtype=torch.long)


def alphabet(source: Source) -> list[str]:
    """The training text's characters, in order."""
    return sorted({"\n"}.union(*(sentence.strip() for sentence in _sentences(source, source.address(), True))))
