"""What is kept: readable by anyone, whole or not there, and nothing that runs code."""

import hashlib
import json
import random
import re
import shutil
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from typer.testing import CliRunner

from cprop_lab.cli import app
from cprop_lab.engine.engine import Engine
from cprop_lab.run.evaluation import BINS
from cprop_lab.run.identity import digest, run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import SCHEMA, DamagedError, Store, storage
from cprop_lab.store.rows import to_row

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
    about = json.loads(row["about"])
    assert about["specification"]["optimizer"] == "cprop-adam"
    curves = hashlib.sha256()
    (columns,) = (run.columns for run in Store(tmp_path).runs())
    for name in SCHEMA.names:
        curves.update(columns[name].tobytes())
    assert about["checksum"] == curves.hexdigest()[:16]  # all that older versions look at


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
    """A packed experiment's manifest and runs as files of their own; with pyarrow alone."""
    packed = pq.read_table(path)
    for folder in ("experiments", "runs"):
        (store / folder).mkdir(parents=True)
    (store / "experiments" / f"{path.stem}.json").write_bytes(packed.schema.metadata[b"experiment"])
    for place, name in enumerate(packed["identity"].to_pylist()):
        row = packed.slice(place, 1).replace_schema_metadata()
        feather.write_feather(row, store / "runs" / f"{name}.arrow", "uncompressed")


def texts(store):
    """What is said about an unpacked experiment and its runs."""
    runs = (feather.read_table(path).to_pylist()[0] for path in (store / "runs").iterdir())
    manifests = {path.stem: path.read_text() for path in (store / "experiments").iterdir()}
    return {name: json.loads(text) for name, text in (manifests | {r["identity"]: r["about"] for r in runs}).items()}


def test_a_packed_experiment_is_the_loose_one(tmp_path):
    """A real one, with runs that diverged, that have no scale, and that selected learning rates."""
    name = "scoreboard-1-ptb-lstm-reduced"
    unpack(EVIDENCE / "experiments" / f"{name}.parquet", tmp_path)
    told = texts(tmp_path)
    store = Store(tmp_path)
    before, about = contents(store), store.experiments()
    assert len(before) == len(told) - 1 > 80
    assert store.pack() == {name: len(before)}
    assert files(tmp_path) == {f"experiments/{name}.parquet"}
    for one in (store, Store(tmp_path)):
        assert contents(one) == before
        assert one.experiments() == about
    unpack(tmp_path / "experiments" / f"{name}.parquet", tmp_path / "again")
    again = texts(tmp_path / "again")
    assert re.fullmatch("[0-9a-f]{16}", again[name].pop("checksum"))  # which the older version did not write
    assert again == told


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
    store.write(RUN, "finished", ROWS, {})
    named = r"one-smoke\.parquet is not a packed experiment .*: restore it from a copy, or run one-smoke again"
    with pytest.warns(UserWarning, match=named):
        assert [run.run_id for run in store.runs()] == [run_id(RUN)]
    with pytest.raises(DamagedError, match=r"one-smoke\.parquet is not a .*before packing, set it aside: .* --mend"):
        store.pack()
    assert path.exists()


# Damage.


def edited(run, **changes):
    """A row with its text changed."""
    about = json.loads(run["about"][0].as_py())
    about["specification"] |= changes
    return run.set_column(1, "about", [[json.dumps(about)]])


def newer(run):
    """A row that has a field this version does not know, and the id that belongs to it."""
    about = json.loads(run["about"][0].as_py())
    about["specification"]["colour"] = "red"
    del about["checksum"], about["row_checksum"]
    return to_row({**about, "identity": digest(about["specification"])}, ROWS)


def ended(run):
    """A row that says that its run diverged."""
    return run.set_column(1, "about", [[run["about"][0].as_py().replace('"finished"', '"diverged"')]])


def swapped(run):
    return run.set_column(run.schema.get_field_index("train_loss"), "train_loss", run["test_loss"])


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        ("cut short", r"it cannot be read \(.*\)"),
        ("another file", "it cannot be read"),
        ("another run's", "it is another run's"),
        ("edited", r"its specification is another run's \(\w{16}\), or was edited"),
        ("swapped curves", "it does not match its checksum: it is another run's, or was changed"),
        ("another end", "it does not match its checksum"),
        ("other words", "it cannot be read"),
    ],
)
def test_a_damaged_run_is_named_and_run_again(tmp_path, damage, wrong):
    quick = RUN.replace(iterations=10, evaluate_every=5, settings={"fused": False})
    engine = Engine(Store(tmp_path), executor="process")
    (run,) = engine.run([quick])
    engine.store.write(RUN, "finished", ROWS, {})
    path = tmp_path / "runs" / f"{run.run_id}.arrow"
    row = feather.read_table(path)
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "another file":
        path.write_text("{}")
    elif damage == "another run's":
        path.write_bytes((tmp_path / "runs" / f"{run_id(RUN)}.arrow").read_bytes())
    elif damage == "other words":
        path.write_bytes(path.read_bytes().replace(b'"status"', b'"stat\xffs"', 1))
    else:
        changed = {"edited": partial(edited, seed=7), "swapped curves": swapped, "another end": ended}[damage](row)
        feather.write_feather(changed, path, "uncompressed")
    named = rf"runs/{run.run_id}\.arrow: run {run.run_id} is damaged, {wrong}.*: run its experiment again"
    with pytest.raises(DamagedError, match=named):
        engine.store.read(run.run_id)
    assert [bool(re.search(named, line)) for line in engine.store.check()] == [True]
    with pytest.warns(UserWarning, match=named):
        assert [one.run_id for one in engine.store.runs()] == [run_id(RUN)]
    with pytest.warns(UserWarning, match=named):
        (again,) = engine.run([quick])
    assert again.column("train_loss").tolist() == run.column("train_loss").tolist()
    assert engine.store.check() == []


def test_what_a_newer_version_wrote_is_not_mended(tmp_path):
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    row = newer(feather.read_table(tmp_path / "runs" / f"{run_id(RUN)}.arrow"))
    path = tmp_path / "runs" / f"{row['identity'][0].as_py()}.arrow"
    feather.write_feather(row, path, "uncompressed")
    (line,) = store.check(mend=True)
    assert re.search(rf"{path.name}: run {path.stem} cannot be read, unknown fields colour: .* install that", line)
    assert path.exists()


def test_a_damaged_row_of_a_packed_experiment_is_mended(tmp_path):
    store = Store(tmp_path)
    runs = [RUN.replace(seed=seed) for seed in range(3)]
    for run in runs:
        store.write(run, "finished", ROWS, {})
    store.write_experiment("one-smoke", {"runs": [run_id(run) for run in runs]})
    store.pack()
    path = tmp_path / "experiments" / "one-smoke.parquet"
    table = pq.read_table(path)
    texts = table["about"].to_pylist()
    texts[1] = texts[1].replace('"seed": ', '"seed": 7')
    pq.write_table(table.set_column(1, "about", [texts]), path)
    bad = table["identity"][1].as_py()
    (line,) = store.check(mend=True)
    assert re.search(rf"one-smoke\.parquet: run {bad} is damaged, its specification is another run's", line)
    assert store.check() == []
    assert store.finished() == {run_id(run) for run in runs} - {bad}
    store.write(next(run for run in runs if run_id(run) == bad), "finished", ROWS, {})
    assert store.pack() == {"one-smoke": 3}
    assert len(Store(tmp_path).runs()) == 3


def test_the_command_lists_damage_and_mends_it(tmp_path):
    store = Store(tmp_path)
    store.write(RUN, "finished", ROWS, {})
    store.write_experiment("one-smoke", {"runs": []})
    store.pack()
    path = tmp_path / "experiments" / "one-smoke.parquet"
    path.write_bytes(path.read_bytes()[:-10])

    def check(*words):
        told = CliRunner().invoke(app, ["check", str(tmp_path), *words])
        return told.exit_code, told.stdout

    code, said = check()
    assert code == 1
    assert "one-smoke.parquet is not a packed experiment" in said
    assert "1 damaged" in said
    assert check("--mend")[0] == 0
    assert check() == (0, "0 damaged\n")


def rows_in(path):
    """The bytes of each group of rows of a packed experiment, and the runs in it."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        columns = [file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns)]
        end = max(one.data_page_offset + one.total_compressed_size for one in columns)
        runs = file.read_row_group(group, columns=["identity"])["identity"].to_pylist()
        yield range(min(one.data_page_offset for one in columns), end), set(runs)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A store of each kind, and for each of its files the bytes that belong to some runs alone, and those runs."""
    root = tmp_path_factory.mktemp("stores")
    for kind in ("loose", "packed"):
        store = Store(root / kind)
        runs = [RUN.replace(seed=seed) for seed in range(7)]
        for run in runs:
            store.write(run, "finished", ROWS, {"commit": "abc", "load": [0.5, 1.25]})
        for name, listed in (("one-smoke", runs[:5]), ("two-smoke", runs[4:6])):
            store.write_experiment(name, {"runs": [run_id(run) for run in listed], "timings": [], "kind": "curves"})
        if kind == "packed":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(storage, "BATCH", 2)
                store.pack()
    (root / "older" / "experiments").mkdir(parents=True)
    for name in ("tiny-imagenet-resnet", "finalist-rates-ptb-lstm-small"):
        shutil.copy(EVIDENCE / "experiments" / f"{name}-reduced.parquet", root / "older" / "experiments")
    places = {}
    for path in (path for path in root.rglob("*") if path.is_file()):
        parts = list(rows_in(path)) if path.suffix == ".parquet" else []
        runs = {path.stem} if path.suffix == ".arrow" else set().union(*(own for _, own in parts))
        places[path.relative_to(root)] = parts, runs
    return root, places


def whole(store):
    """What can be read of a store, to the bit, and its manifests."""
    with warnings.catch_warnings(action="ignore"):
        runs = {
            run.run_id: (
                run.specification,
                run.status,
                run.provenance,
                {k: v.tobytes() for k, v in run.columns.items()},
            )
            for run in store.runs()
        }
        return runs, store.experiments()


def damage(path, parts, runs, chance):
    """Flip a bit, cut a file short or delete it: the runs that may be lost by that, and whether it leaves a trace."""
    contents = bytearray(path.read_bytes())
    at = chance.randrange(len(contents))
    blow = chance.choices(("flip", "cut", "delete"), (8, 1, 1))[0]
    if blow == "delete":
        path.unlink()
        return runs, False
    if blow == "flip":
        contents[at] ^= 1 << chance.randrange(8)
        runs = next((own for place, own in parts if at in place), runs)
    path.write_bytes(contents if blow == "flip" else contents[:at])
    return runs, True


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trials", [range(300), pytest.param(range(300, 10_300), marks=pytest.mark.nightly)], ids=len)
def test_what_is_damaged_costs_what_it_held(trials, stores, tmp_path, monkeypatch):
    """Whatever is damaged, and wherever: it is named, it can be set aside, and all else is used as before."""
    monkeypatch.setattr(storage, "_sync", lambda path: None)  # a power failure is no part of this
    root, places = stores
    before = {kind: whole(Store(root / kind)) for kind in ("loose", "packed", "older")}
    assert {kind: len(runs) for kind, (runs, _) in before.items()} == {"loose": 7, "packed": 7, "older": 16}
    seen = 0
    for trial in trials:
        chance = random.Random(trial)
        kind, folder = chance.choice(sorted(before)), tmp_path / str(trial)
        victim = chance.choice([place for place in sorted(places) if place.parts[0] == kind])
        shutil.copytree(root / kind, folder)
        hit, traced = damage(folder.joinpath(*victim.parts[1:]), *places[victim], chance)

        runs, experiments = whole(Store(folder))
        ours, theirs = before[kind]
        assert ours.keys() - hit <= runs.keys() <= ours.keys(), (trial, victim)
        assert theirs.keys() - {victim.stem} <= experiments.keys(), (trial, victim)
        if kind != "older":  # whose text has no checksum
            assert all(ours[name] == run for name, run in runs.items()), (trial, victim)
            assert all(theirs[name] == about for name, about in experiments.items()), (trial, victim)
        said = Store(folder).check()
        assert all(line.isprintable() for line in said), (trial, victim)
        lost = ours.keys() - runs.keys() if traced else ()
        named = "\n".join(said)
        assert all(name in named or f"{victim.stem} again" in named for name in lost), (trial, victim, said)
        assert Store(folder).check(mend=True) == said
        assert (folder / "damaged").exists() == bool(said)
        assert Store(folder).check() == [], (trial, victim)
        assert whole(Store(folder))[0] == runs, (trial, victim)
        seen += bool(said)
        shutil.rmtree(folder)
    assert seen > len(trials) / 3  # the rest was deleted, hit what no reader needs, or had no checksum


def test_a_row_of_an_older_version_is_read(tmp_path):
    """One without a checksum, and one with a checksum of its curves alone."""
    (tmp_path / "experiments").mkdir()
    older = []
    for name in ("tiny-imagenet-resnet", "finalist-rates-ptb-lstm-small"):
        path = shutil.copy(EVIDENCE / "experiments" / f"{name}-reduced.parquet", tmp_path / "experiments")
        older += [len(json.loads(text).get("checksum", "")) for text in pq.read_table(path)["about"].to_pylist()]
    assert set(older) == {0, 16}
    assert Store(tmp_path).check() == []
    assert len(Store(tmp_path).runs()) == len(older)


def test_a_store_grows_in_proportion_to_its_runs(tmp_path):
    sizes = []
    for many in (10, 20, 40):
        store = Store(tmp_path / str(many))
        runs = [RUN.replace(seed=seed) for seed in range(many)]
        for run in runs:
            store.write(run, "finished", ROWS, {"commit": "abc"})
        store.write_experiment("one-smoke", {"runs": [run_id(run) for run in runs]})
        loose = sum(path.stat().st_size for path in (tmp_path / str(many)).rglob("*.*"))
        store.pack()
        sizes.append((loose, sum(path.stat().st_size for path in (tmp_path / str(many)).rglob("*.*"))))
    for (loose, packed), (more, twice) in pairwise(sizes):
        assert more <= 2 * loose
        assert twice <= 2 * packed
