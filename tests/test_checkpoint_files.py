"""Checkpoint files and folders: complete, or refused."""

import os
import pickle
import random
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table import equal, inputs, train

import cprop
from cprop import CheckpointError, checkpoint_files

# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "last.pt"
    params = inputs()
    optimizer = cprop.CPropAdam(params, lr=0.01)
    train(optimizer, params, 3)
    checkpoint_files.save({"optimizer": optimizer.state_dict(), "step": 3}, path)
    return path


def test_a_saved_file_is_torchs_own_and_nothing_is_left_beside_it(file):
    assert torch.load(file, weights_only=True)["step"] == 3
    assert checkpoint_files.load(file)["step"] == 3
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(file, part):
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(CheckpointError, match=r"is not a checkpoint, or is truncated .*: use an older one"):
        checkpoint_files.load(file)


@pytest.mark.slow
def test_flipped_bits_are_refused_or_change_nothing(file):
    """torch.load would take most of them for data. What remains is padding, and file names in the index."""
    content = file.read_bytes()
    whole = checkpoint_files.load(file)
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(bytes(damaged))
        try:
            loaded = checkpoint_files.load(file)
        except CheckpointError:
            refused += 1
        else:
            assert equal(loaded, whole)
    assert refused > 100


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_does_not(container, tmp_path):
    path, witness = tmp_path / "hostile.pt", tmp_path / "it-ran"
    if container == "torch":
        torch.save({"optimizer": Hostile(str(witness))}, path)
    else:
        path.write_bytes(pickle.dumps(Hostile(str(witness))))
    with pytest.raises(CheckpointError, match=r"could run code|is not a checkpoint"):
        checkpoint_files.load(path)
    assert not witness.exists()


def test_a_missing_file_is_just_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint_files.load(tmp_path / "none.pt")


def test_an_interrupted_save_leaves_the_older_file(file):
    class Stopped(Exception):  # noqa: N818
        pass

    class Awkward:
        def __reduce__(self):
            raise Stopped

    with pytest.raises(Stopped):
        checkpoint_files.save({"step": 4, "awkward": Awkward()}, file)
    assert checkpoint_files.load(file)["step"] == 3
    assert list(file.parent.iterdir()) == [file]


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "step-1"
    root.mkdir()
    for i in range(5):
        (root / f"__{i}_0.distcp").write_bytes(os.urandom(1000))
    for rank in range(2):
        checkpoint_files.seal(root, rank, 2)
    return root


@pytest.mark.parametrize("world", [1, 2, 7])
def test_a_sealed_folder_is_verified_by_any_number_of_ranks(folder, world):
    for rank in range(world):
        checkpoint_files.verify(folder, rank, world)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "__3_0.distcp").unlink(), "should contain .* but contains"),
        (lambda root: (root / "__9_0.distcp").write_bytes(b""), "should contain .* but contains"),
        (lambda root: (root / "sha256-1.json").unlink(), "not sealed by all ranks"),
        (lambda root: (root / "sha256-1.json").write_text("{"), "cannot be read"),
        (lambda root: [p.unlink() for p in root.glob("sha256-*")], "not sealed by all ranks"),
        (lambda root: (root / "__3_0.distcp").write_bytes(bytes(1000)), r"__3_0\.distcp is damaged: use an older"),
    ],
)
def test_a_damaged_folder_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        [checkpoint_files.verify(folder, rank, 3) for rank in range(3)]


@given(st.integers(0, 4), st.integers(0, 999), st.integers(0, 7))
def test_no_flipped_bit_passes(tmp_path_factory, file, byte, bit):
    root = tmp_path_factory.mktemp("sealed")
    for i in range(5):
        (root / f"{i}").write_bytes(bytes([i]) * 1000)
    checkpoint_files.seal(root)
    content = bytearray((root / f"{file}").read_bytes())
    content[byte] ^= 1 << bit
    (root / f"{file}").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint_files.verify(root)
    shutil.rmtree(root)
