"""Data for the laboratory's tests: the real data sets from ``CPROP_LAB_DATA`` if set, or files of the same format."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL = os.environ.get("CPROP_LAB_DATA")
# For processes of their own: tasks.py is found, and what is tested is what is tested here.
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def image(size, mode, form, random):
    shape = (size, size) if mode == "L" else (size, size, 3)
    stream = io.BytesIO()
    options = {"lossless": True} if form == "WEBP" else {}
    Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8), mode).save(stream, form, **options)
    return {"bytes": stream.getvalue(), "path": None}


def write_images(folder, splits, column, label, size, mode, form, classes):
    from datasets import Dataset, Features, Value  # here, because this import takes seconds
    from datasets import Image as Feature
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, rows in splits.items():
        # Some of Tiny ImageNet's images are grayscale.
        images = [image(size, "L" if form == "JPEG" and i % 7 == 0 else mode, form, random) for i in range(rows)]
        features = Features({column: Feature(), label: Value("int64")})
        table = Dataset.from_dict({column: images, label: [i % classes for i in range(rows)]}, features=features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def write_text(folder):
    folder.mkdir()
    random = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    for split, lines in {"train": 600, "valid": 10, "test": 300}.items():
        text = "\n".join(" " + " ".join(random.choice(words, 8)) + " " for _ in range(lines))
        (folder / f"ptb.{split}.txt").write_text(text + "\n")


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """Files in the format of the real ones, filled with noise."""
    root = tmp_path_factory.mktemp("data")
    write_images(root / "fashion_mnist", {"train": 96, "test": 40}, "image", "label", 28, "L", "PNG", 10)
    write_images(root / "cifar100", {"train": 96, "test": 40}, "img", "fine_label", 32, "RGB", "WEBP", 100)
    write_images(root / "tiny_imagenet", {"train": 70, "valid": 35}, "image", "label", 64, "RGB", "JPEG", 10)
    write_text(root / "penn_treebank")
    return root


@pytest.fixture
def data_root(generated, monkeypatch, tmp_path):
    """A folder of data sets, with its own cache for decoded data."""
    if not REAL:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = Path(REAL) if REAL else generated
    monkeypatch.setenv("CPROP_LAB_DATA", str(root))
    return root
