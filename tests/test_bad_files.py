"""Damaged, foreign and hostile checkpoints: refused with one error, and nothing half-loaded."""

import copy
import os
import pickle
import random
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table import gradients, inputs, train

import cprop
from cprop import CheckpointError, checkpoint_files

OPTIMIZERS = {
    "CPropAdam": lambda ps: cprop.CPropAdam(ps, lr=0.01),
    "CPropSGD": lambda ps: cprop.CPropSGD(ps, lr=0.01, momentum=0.9),
    "CPropRMSprop": lambda ps: cprop.CPropRMSprop(ps, lr=0.01),
    "CPropAdaBound": lambda ps: cprop.CPropAdaBound(ps, lr=0.01),
    "CProp(SGD)": lambda ps: cprop.CProp(torch.optim.SGD(ps, lr=0.01, momentum=0.9)),
    "CProp(AdamW)": lambda ps: cprop.CProp(torch.optim.AdamW(ps, lr=0.01)),
}


def trained(name, steps=3):
    params = inputs()
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, steps)
    return params, optimizer


# --- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [MemoryError("out of memory"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr
)
@pytest.mark.parametrize("name", ["CPropAdam", "CProp(AdamW)"])
def test_running_out_of_memory_is_not_called_damage(name, error):
    def run_out(*_):
        raise error

    _, optimizer = trained(name)
    optimizer.register_load_state_dict_pre_hook(run_out)
    with pytest.raises(type(error), match="out of memory"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_running_out_of_a_cpus_memory_is_not_called_damage():
    p = torch.nn.Parameter(torch.zeros(()).expand(1 << 50))  # one number; its state would be four petabytes
    optimizer = cprop.CPropSGD([p], lr=0.01)
    state = {"cprop_step": 1.0, "cprop_m": p.detach(), "cprop_v": p.detach()}
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})


REPLACEMENTS = [
    None, True, -1, 0, 3, 0.5, -0.1, float("nan"), float("inf"), 1e30, "", "normal", b"x", [], {}, (), (0.9,),
    [1, 2, 3], (0.9, "x"), {"a": 1}, object(), len, torch.zeros(0), torch.zeros(3), torch.tensor(2.0),
    torch.zeros(4, 3), torch.ones(5, dtype=torch.int64), torch.zeros(5, dtype=torch.bool), torch.full((5,), torch.nan),
    torch.zeros(1, 5),
]  # fmt: skip


def places(x, path=()):
    """Every place in nested dictionaries and lists, by path."""
    yield path
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutate(x, path, change):
    """A copy with a change at one place."""
    if not path:
        return change(x)
    key, *rest = path
    if isinstance(x, dict):
        changed = dict(x)
        value = mutate(x[key], rest, change)
        if value is REMOVED:
            del changed[key]
        elif isinstance(value, Renamed):
            changed[value.key] = changed.pop(key)
        else:
            changed[key] = value
        return changed
    values = list(x)
    value = mutate(x[key], rest, change)
    if value is REMOVED:
        del values[key]
    else:
        values[key] = x[key] if isinstance(value, Renamed) else value
    return type(x)(values)


REMOVED = object()


class Renamed:
    def __init__(self, key):
        self.key = key


def mutations(state_dict, rng):
    path = rng.choice(list(places(state_dict)))
    kind = rng.randrange(4)
    if kind == 0 and path:
        return mutate(state_dict, path, lambda _: REMOVED)
    if kind == 1 and path:
        return mutate(
            state_dict, path, lambda _: Renamed(rng.choice([0, 1, 99, "step", "exp_avg", "cprop_m", None, ()]))
        )
    return mutate(state_dict, path, lambda _: rng.choice(REPLACEMENTS))


def snapshot(optimizer):
    return copy.deepcopy([optimizer.state_dict(), [dict(s) for s in optimizer.state.values()]])


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mutated_state_dicts_load_or_are_refused_whole(name):
    """Each one loads, or raises our error and changes nothing.

    Our own optimizers can be stepped then; what an inner one makes of its state is its own.
    """
    count = int(os.environ.get("CPROP_FUZZ", 600)) // len(OPTIMIZERS) + 1
    rng = random.Random(name)
    params, source = trained(name)
    state_dict = source.state_dict()
    params, optimizer = trained(name, 2)
    refused = loaded = 0
    before = snapshot(optimizer)
    for _ in range(count):
        mutated = state_dict
        for _ in range(rng.choice((1, 1, 2))):
            mutated = mutations(mutated, rng)
        try:
            optimizer.load_state_dict(mutated)
        except CheckpointError:
            refused += 1
            if refused % 10 == 0:
                assert equal(snapshot(optimizer), before)
        else:
            loaded += 1
            if not name.startswith("CProp("):
                gradients(params, 0)
                optimizer.step()
            params, optimizer = trained(name, 2)
    assert equal(snapshot(optimizer), before)
    assert refused > count / 3
    assert loaded > count / 100


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sd: sd["state"][1].update(cprop_m=torch.zeros(7)), r"'cprop_m' has shape \(7,\) .* should have \(5,\)"),
        (lambda sd: sd["state"][1].update(cprop_m="x"), "'cprop_m' should be a tensor, but has type str"),
        (lambda sd: sd["state"][1].update(cprop_m=torch.zeros(5).int()), "should be floating-point or complex"),
        (lambda sd: sd["state"][1].update(cprop_step=-2), "'cprop_step' is -2.0, which is not a valid number"),
        (lambda sd: sd["state"][1].pop("cprop_m"), r"but not \['cprop_m'\]: it is incomplete"),
        (lambda sd: sd["param_groups"][0].update(lr="fast"), "'lr' of param group 0 is 'fast' in the checkpoint"),
        (lambda sd: sd["param_groups"][0].update(cprop_beta=1.5), "invalid cprop_beta 1.5"),
        (lambda sd: sd["param_groups"][0]["params"].pop(), "has 5 parameters in the checkpoint and 6 in the optimizer"),
        (lambda sd: sd["state"].update({1: 3}), "the state of parameter 1 is not a dictionary"),
        (lambda sd: sd.pop("state"), "this is not an optimizer's state_dict"),
    ],
)
def test_what_is_wrong_is_said(name, damage, message):
    _, optimizer = trained(name)
    before = snapshot(optimizer)
    state_dict = copy.deepcopy(optimizer.state_dict())
    damage(state_dict)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state_dict)
    assert equal(snapshot(optimizer), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_one_number_is_not_broadcast(name):
    _, optimizer = trained(name)
    for key, value in optimizer.state_dict()["state"][1].items():
        if not key.endswith("step") and (key.startswith("cprop_") or not name.startswith("CProp(")):
            assert value.shape == (5,)
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["state"][1][key] = torch.zeros(1)
            with pytest.raises(CheckpointError, match=rf"'{key}' has shape \(1,\) .* should have \(5,\)"):
                optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("CProp(")])
@pytest.mark.parametrize("damage", [{"weight_decay": "much"}, {"cprop_c": None}, {"maximize": [1]}])
def test_settings_of_an_inner_optimizer_that_torch_names_are_checked(name, damage):
    _, optimizer = trained(name)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0].update(damage)
    with pytest.raises(CheckpointError, match=rf"'{next(iter(damage))}' of param group 0 is"):
        optimizer.load_state_dict(state_dict)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint_files.save({"optimizer": trained("CPropAdam")[1].state_dict(), "step": 3}, path)
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
