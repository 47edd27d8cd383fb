"""What is kept: readable by anyone, whole or not there, and nothing that runs code."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from cprop_lab.run.evaluation import BINS
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

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


def test_any_tool_reads_the_files(tmp_path):
    Store(tmp_path).write(RUN, "finished", ROWS, {})
    name = run_id(RUN)
    assert pq.read_table(tmp_path / "runs" / f"{name}.parquet")["step"].to_pylist() == [0, 10]
    about = json.loads((tmp_path / "runs" / f"{name}.json").read_text())
    assert about["specification"]["optimizer"] == "cprop-adam"
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".parquet", ".json"}


def test_a_run_without_its_specification_is_not_finished(tmp_path):
    """A kill between the two files: the run is run again."""
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    (tmp_path / "runs" / f"{run_id(RUN)}.json").unlink()
    assert store.finished() == set()
    with pytest.raises(FileNotFoundError, match=r"holds no finished run .*: run its experiment first"):
        store.read(run_id(RUN))


def test_half_a_file_is_not_seen(tmp_path):
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    (tmp_path / "runs" / ".0123-half.json").write_text("{")
    assert store.finished() == {run_id(RUN)}


def test_an_address_is_as_good_as_a_folder(tmp_path):
    by_address = Store(tmp_path.as_uri())
    by_address.write(RUN, "finished", ROWS, {})
    assert Store(tmp_path).finished() == {run_id(RUN)}
    assert by_address.local("figures") == tmp_path / "figures"
