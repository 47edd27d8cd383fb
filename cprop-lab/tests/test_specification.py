"""A run's name follows from what decides its numbers, and from nothing else."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cprop_lab.run.identity import run_id
from cprop_lab.run.optimizers import build
from cprop_lab.run.specification import Specification

BLOBS = Specification("tasks:Blobs", "cprop-adam", lr=1e-3, iterations=10)


@given(
    lr=st.floats(1e-9, 1e3),
    seed=st.integers(0, 2**31),
    settings=st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text())),
)
def test_it_survives_text_and_pickle(lr, seed, settings):
    run = Specification("fmnist-fc", "adam", lr=lr, seed=seed, settings=settings)
    for copy in (Specification.from_json(run.to_json()), pickle.loads(pickle.dumps(run))):
        assert copy == run
        assert hash(copy) == hash(run)


def test_every_part_of_it_makes_another_run():
    changes = {
        "optimizer": "adam",
        "lr": 2e-3,
        "seed": 1,
        "batch_size": 16,
        "iterations": 11,
        "precision": "bfloat16",
        "settings": {"cprop_c": 3.0},
        "options": {"dropout": 0.1},
        "evaluate_every": 7,
        "examples": 5,
    }
    names = {run_id(BLOBS.replace(**{name: value})) for name, value in changes.items()}
    assert len(names | {run_id(BLOBS)}) == len(changes) + 1


def test_a_default_that_is_written_out_makes_the_same_run():
    assert run_id(BLOBS.replace(settings={"cprop_c": 1.0, "beta1": 0.9})) == run_id(BLOBS)


def test_the_order_of_settings_does_not_matter():
    a, b = ({"beta1": 0.8, "eps": 1e-7}, {"eps": 1e-7, "beta1": 0.8})
    assert BLOBS.replace(settings=a) == BLOBS.replace(settings=b)
    assert hash(BLOBS.replace(settings=a)) == hash(BLOBS.replace(settings=b))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0}, r"lr is 0.0: it must be positive and finite"),
        ({"lr": float("nan")}, r"lr is nan: it must be positive and finite"),
        ({"iterations": 0}, r"iterations is 0: it must be at least 1"),
        ({"precision": "float16"}, r"precision is 'float16': choose one of float32, bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BLOBS.replace(**change)


def test_the_format_of_the_state_is_a_setting_of_other_runs_alone():
    usual, lean = (BLOBS.replace(settings={"cprop_state_dtype": dtype}) for dtype in ("float32", "bfloat16"))
    assert run_id(usual) == run_id(usual.replace(settings={})) != run_id(lean)
    for optimizer in ("cprop-adam", "cprop-muon"):  # a native one, and the wrapper
        built, _ = build(lean.replace(optimizer=optimizer).eager(), nn.Linear(2, 2))
        assert {group["cprop_state_dtype"] for group in built.param_groups} == {"bfloat16"}


def test_a_specification_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"unknown fields colour: the specification was written by another version"):
        Specification.from_json('{"workload": "a", "optimizer": "sgd", "lr": 1, "colour": 1}')


def test_a_setting_that_the_optimizer_does_not_have_is_refused():
    with pytest.raises(
        ValueError, match=r"cprop-adam has no setting momentum: it has beta1, beta2, eps, fused, cprop_"
    ):
        run_id(BLOBS.replace(settings={"momentum": 0.9}))


def test_unknown_names_are_told_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamm': choose one of sgd, adam, .* cprop- before it"):
        run_id(BLOBS.replace(optimizer="adamm"))
    with pytest.raises(ValueError, match=r"CProp cannot wrap schedule-free-adamw, which keeps different weights"):
        run_id(BLOBS.replace(optimizer="cprop-schedule-free-adamw"))
    with pytest.raises(ValueError, match=r"no workload is called 'mnist': take one of fmnist-fc, .* or module:Task"):
        run_id(BLOBS.replace(workload="mnist"))
    with pytest.raises(ValueError, match=r"'tasks:Nothing' cannot be imported from"):
        run_id(BLOBS.replace(workload="tasks:Nothing"))


def test_the_wrapper_is_fused_as_the_natives_are_unless_nothing_can_be_compiled():
    for optimizer, flag in (("cprop-muon", "cprop_fused"), ("cprop-adamw", "fused")):
        specification = Specification("fmnist-fc", optimizer, lr=0.1)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        for run, fused in ((specification, True), (specification.eager(), False)):
            built, _ = build(run, model)
            assert {group[flag] for group in built.param_groups} == {fused}
