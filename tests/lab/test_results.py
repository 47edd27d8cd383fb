"""What is kept: readable by anyone, whole or not there, and nothing that runs code."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from cprop_lab.run.evaluation import BINS
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import SCHEMA, Store

RUN = Specification("tasks:Blobs", "cprop-adam", lr=1e-3, settings={"cprop_c": 3.0})
ROWS = [
    {"step": 0, "seconds": 0.0, "train_loss": 2.5, "test_loss": 2.6, "lr": 1e-3},
    {
        "step": 10,
        "seconds": 0.5,
        "train_loss": 1.5,
        "test_loss": 1.6,
        "accuracy": 0.5,
        "lr": 1e-3,
        "mean_scale": 0.25,
        "scale_histogram": [1 / BINS] * BINS,
    },
]


def test_a_run_comes_back_as_it_was(tmp_path):
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {"commit": "abc"})
    (run,) = Store(tmp_path).runs()
    assert run.specification.replace(settings=RUN.settings) == RUN  # the defaults are written out
    assert run.specification.settings["cprop_beta"] == 0.999
    assert run_id(run.specification) == run.run_id == run_id(RUN)
    assert run.column("train_loss").tolist() == [2.5, 1.5]
    assert np.isnan(run.column("accuracy")[0])
    assert run.histogram().shape == (2, BINS)
    assert run.provenance == {"commit": "abc"}


def test_any_tool_reads_the_file(tmp_path):
    Store(tmp_path).write(RUN, "finished", ROWS, {})
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path == tmp_path / "runs" / f"{run_id(RUN)}.arrow"
    (row,) = feather.read_table(path).to_pylist()
    assert row["step"] == [0, 10]
    assert json.loads(row["about"])["specification"]["optimizer"] == "cprop-adam"


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no finished run .*: run its experiment first"):
        Store(tmp_path).read(run_id(RUN))


def test_half_a_file_is_not_seen(tmp_path):
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    (tmp_path / "runs" / ".0123-half.arrow").write_text("{")
    assert store.finished() == {run_id(RUN)}


def test_an_address_is_as_good_as_a_folder(tmp_path):
    by_address = Store(tmp_path.as_uri())
    by_address.write(RUN, "finished", ROWS, {})
    assert Store(tmp_path).finished() == {run_id(RUN)}
    assert by_address.local("figures") == tmp_path / "figures"


# Packed experiments.

EVIDENCE = Path(__file__).parents[2] / "evidence"


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def contents(store):
    return [
        (run.run_id, run.specification, run.status, run.provenance, repr(run.curves.to_pydict()))
        for run in store.runs()
    ]


def unpack(path, store):
    """The runs of a packed experiment as files of their own, as older versions wrote them; with pyarrow alone."""
    packed = pq.read_table(path)
    for folder, name, text in (
        ("experiments", path.stem, packed.schema.metadata[b"experiment"].decode()),
        *(("runs", row["identity"], row["about"]) for row in packed.select(["identity", "about"]).to_pylist()),
    ):
        (store / folder).mkdir(exist_ok=True)
        (store / folder / f"{name}.json").write_text(text)
    for row in packed.to_pylist():
        curves = pa.Table.from_pydict({column: row[column] for column in SCHEMA.names}, SCHEMA)
        pq.write_table(curves, store / "runs" / f"{row['identity']}.parquet")


def test_a_packed_experiment_is_the_loose_one(tmp_path):
    """A real one, with runs that diverged, that have no scale, and that selected learning rates."""
    name = "scoreboard-1-ptb-lstm-reduced"
    unpack(EVIDENCE / "experiments" / f"{name}.parquet", tmp_path)
    texts = {path.stem: path.read_text() for path in tmp_path.rglob("*.json")}
    store = Store(tmp_path)
    before, about = contents(store), store.experiments()
    assert len(before) == len(texts) - 1 > 80
    assert store.pack() == {name: len(before)}
    assert files(tmp_path) == {f"experiments/{name}.parquet"}
    for one in (store, Store(tmp_path)):
        assert contents(one) == before
        assert one.experiments() == about
    (tmp_path / "again").mkdir()
    unpack(tmp_path / "experiments" / f"{name}.parquet", tmp_path / "again")
    assert {path.stem: path.read_text() for path in tmp_path.rglob("again/*/*.json")} == texts


def test_packing_takes_what_belongs_to_experiments_and_can_be_repeated(tmp_path):
    store = Store(tmp_path)
    shared, search, own, other = (
        RUN,
        RUN.replace(lr=3e-3),
        RUN.replace(seed=1),
        RUN.replace(optimizer="sgd", settings={}),
    )
    for run in (shared, search, other):
        store.write(run, "finished", ROWS, {})
    store.write_experiment("one-smoke", {"runs": [run_id(shared), "not yet run"]})
    store.write_experiment("two-smoke", {"runs": [run_id(shared)]})
    store.write_experiment("begun-smoke", {"runs": ["not yet run"]})
    assert store.pack() == {"begun-smoke": 0, "one-smoke": 2, "two-smoke": 1}
    packed = {f"experiments/{name}-smoke.parquet" for name in ("begun", "one", "two")}
    loose = {f"runs/{run_id(other)}.arrow"}
    assert files(tmp_path) == packed | loose

    reader = Store(tmp_path)
    everything = {run_id(run) for run in (shared, search, other)}
    assert reader.finished() == everything
    store.write(own, "diverged", [], {})
    store.write_experiment("two-smoke", {"runs": [run_id(shared)], "timings": [run_id(own)]})
    assert reader.experiments()["two-smoke"]["timings"] == [run_id(own)]
    one = (tmp_path / "experiments" / "one-smoke.parquet").stat()
    assert store.pack() == {"begun-smoke": 0, "one-smoke": 2, "two-smoke": 2}
    assert files(tmp_path) == packed | loose
    assert (tmp_path / "experiments" / "one-smoke.parquet").stat() == one
    assert reader.finished() == everything | {run_id(own)}
    assert len(reader.read(run_id(own)).curves) == 0
    assert Store(tmp_path).read(run_id(own)).status == "diverged"


def test_a_kill_while_packing_loses_nothing(tmp_path):
    """Files are written before any is deleted: afterwards a run may be there twice."""
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    store.write_experiment("one-smoke", {"runs": [run_id(RUN)]})
    twice = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    store.pack()
    for path, kept in twice.items():
        path.write_bytes(kept)
    assert Store(tmp_path).finished() == {run_id(RUN)}
    assert len(Store(tmp_path).runs()) == 1
    assert store.pack() == {"one-smoke": 1}
    assert files(tmp_path) == {"experiments/one-smoke.parquet"}


@pytest.mark.parametrize("damage", ["cut short", "another table"])
def test_a_file_that_is_no_packed_experiment_is_named(tmp_path, damage):
    path = tmp_path / "experiments" / "one-smoke.parquet"
    store = Store(tmp_path)
    store.write_experiment("one-smoke", {"runs": []})
    store.pack()
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        pq.write_table(pa.table({"step": [0]}), path)
    with pytest.raises(
        ValueError, match=r"one-smoke\.parquet is not a packed experiment .*: restore it from a copy, or"
    ):
        store.runs()
