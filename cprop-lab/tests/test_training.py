"""A run stopped anywhere goes on to the bit, whatever the optimizer; and its curves are what they say."""

import math
import time

import numpy as np
import pytest
import torch

from cprop import Moments
from cprop_lab.engine import train as training
from cprop_lab.engine.train import train
from cprop_lab.run import measures
from cprop_lab.run.evaluation import BINS
from cprop_lab.run.identity import run_id
from cprop_lab.run.recipes import RECIPES
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training
from cprop_lab.store import Store

eager = Specification.eager
BLOBS = Specification("tasks:Blobs", "cprop-adam", lr=1e-2, iterations=60, evaluate_every=20, examples=200)
# All without kernels: this is about the run and not about the step, and compiling takes seconds.


ALL = [prefix + base for base, recipe in RECIPES.own.items() for prefix in ([""] if recipe.alone else ["", "cprop-"])]
COMBINED = ["adamw+cosine", "cprop-adam+cosine+average", "sgd+ema", "cprop-muon+wsd", "gpa-adamw", "adamw+rsqrt"]
SET = [
    ("cprop-adam", {"cprop_start": 20}),  # before the stop
    ("cprop-lion", {"cprop_start": 40}),  # and after it
    ("cprop-adam+cosine", {"cprop_start": 40}),
    ("cprop-sgd", {"cprop_measure": "layer_mean"}),
    ("cprop-adam", {"cprop_measure": "square_of_s"}),
]


def curves(run):
    """All but the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of other packages' optimizers
@pytest.mark.parametrize(
    "specification",
    [
        *(BLOBS.replace(optimizer=name) for name in COMBINED),
        *(pytest.param(BLOBS.replace(optimizer=name), marks=pytest.mark.slow) for name in ALL),
        *(pytest.param(BLOBS.replace(optimizer=n, settings=settings), marks=pytest.mark.slow) for n, settings in SET),
    ],
    ids=lambda specification: f"{specification.optimizer}{''.join(map(str, specification.settings.values()))}",
)
def test_stopped_and_resumed_is_not_stopped_to_the_bit(specification, tmp_path):
    stopped_and_resumed_is_not_stopped_to_the_bit(specification, tmp_path)


def stopped_and_resumed_is_not_stopped_to_the_bit(specification, tmp_path):
    specification = eager(specification)
    whole = Training(specification)
    first = Training(specification)
    for one in (whole, first):
        one.evaluate()
        one.advance(27)  # in the middle of an epoch of 15 batches, and between two evaluations
    store = Store(tmp_path)
    store.save_checkpoint("it", first.state_dict())
    second = Training(specification)
    second.load_state_dict(store.load_checkpoint("it"))
    for one in (whole, second):
        one.advance(33)
        one.evaluate()
    assert curves(second.rows) == curves(whole.rows)
    for ours, theirs in zip(second.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_run_is_the_same_every_time_and_another_seed_is_another(tmp_path):
    one, same, other = (Store(tmp_path / name) for name in ("one", "same", "other"))
    for store, seed in ((one, 0), (same, 0), (other, 1)):
        train(eager(BLOBS.replace(seed=seed)), store)
    (first,), (second,), (third,) = one.runs(), same.runs(), other.runs()
    drop = ["seconds"]
    assert first.curves.drop_columns(drop).equals(second.curves.drop_columns(drop))
    assert not np.array_equal(first.column("train_loss"), third.column("train_loss"))


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    store = Store(tmp_path)
    train(eager(BLOBS), store)
    monkeypatch.setattr(training, "Training", None)
    assert train(eager(BLOBS), store) == "finished"


@pytest.mark.slow
def test_what_a_kill_costs_is_bounded_by_the_clock(tmp_path):
    """Stopped from outside at an evaluation, it goes on from the last checkpoint."""
    store = Store(tmp_path)

    class Killed(BaseException):
        pass

    def kill(row):
        if row["step"] == 40:
            raise Killed

    with pytest.raises(Killed):
        train(eager(BLOBS), store, kill, checkpoint_seconds=0)
    at = store.load_checkpoint(run_id(eager(BLOBS)))["step"]
    assert 20 <= at < 40
    seen = []
    train(eager(BLOBS), store, seen.append, checkpoint_seconds=0)
    assert [row["step"] for row in seen] == [40, 60]
    undisturbed = Store(tmp_path / "undisturbed")
    train(eager(BLOBS), undisturbed)
    (ours,), (theirs,) = store.runs(), undisturbed.runs()
    assert ours.curves.drop_columns(["seconds"]).equals(theirs.curves.drop_columns(["seconds"]))
    assert list(ours.column("step")) == [0, 20, 40, 60]
    assert store.load_checkpoint(ours.run_id) is None  # what is finished keeps no checkpoint


def test_checkpoints_that_take_long_are_written_rarely(tmp_path, monkeypatch):
    """By default at most a twentieth of the time goes into writing them; what the user asks for is done."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)

    class Slow(Store):
        def save_checkpoint(self, name, checkpoint):
            self.written = [*getattr(self, "written", []), checkpoint["step"]]
            time.sleep(5)

    rare, often = Slow(tmp_path / "rare"), Slow(tmp_path / "often")
    train(eager(BLOBS), rare)
    assert len(rare.written) == 1  # the next is due after 95 seconds
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    train(eager(BLOBS), often, checkpoint_seconds=0)
    assert len(often.written) > 1


def test_a_damaged_checkpoint_starts_the_run_over_and_says_so(tmp_path):
    store = Store(tmp_path)
    name = run_id(eager(BLOBS))
    store.save_checkpoint(name, {"step": 3})
    path = tmp_path / "checkpoints" / f"{name}.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=f"run {name} starts from the beginning: .*is truncated"):
        assert train(eager(BLOBS), store) == "finished"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_diverges_ends_early_and_is_kept(tmp_path):
    store = Store(tmp_path)
    assert train(eager(BLOBS.replace(optimizer="sgd", lr=1e8, iterations=1000)), store) == "diverged"
    (run,) = store.runs()
    assert run.status == "diverged"
    assert run.column("step")[-1] < 1000


def test_the_scales_of_a_row_are_those_of_the_optimizer():
    run = Training(eager(BLOBS))
    run.advance(30)
    row = run.evaluate()
    scales = torch.cat([scale.flatten() for _, scale in run.optimizer.scales()])
    assert row["mean_scale"] == pytest.approx(scales.mean().item(), rel=1e-6)
    assert sum(row["scale_histogram"]) == pytest.approx(1)
    expected = torch.histc(scales, BINS, 0, 1) / len(scales)
    torch.testing.assert_close(torch.tensor(row["scale_histogram"]), expected, atol=2 / len(scales), rtol=0)


def test_a_plain_optimizer_has_no_scales():
    run = Training(eager(BLOBS.replace(optimizer="adam")))
    run.advance(2)
    assert run.evaluate().get("mean_scale") is None


# Schedule-Free moves the weights to where they are evaluated and back, which rounds.
@pytest.mark.parametrize(("optimizer", "tolerance"), [("cprop-adam+ema", 0), ("schedule-free-adamw", 1e-6)])
def test_an_evaluation_changes_nothing(optimizer, tolerance):
    watched, alone = (Training(eager(BLOBS.replace(optimizer=optimizer))) for _ in range(2))
    for _ in range(10):
        watched.advance(1)
        watched.evaluate()
    alone.advance(10)
    alone._train_mode(True)
    watched._train_mode(True)
    for ours, theirs in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_losses_are_means_over_the_data():
    run = Training(eager(BLOBS.replace(examples=10_000)))
    run.advance(20)
    row = run.evaluate()
    run.model.eval()
    points, labels = run.test_data
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(run.model(points), labels).item()
    assert row["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert 0.4 < row["accuracy"] <= 1
    assert row["perplexity"] is None


def test_a_map_style_dataset_and_bfloat16(tmp_path):
    store = Store(tmp_path)
    run = eager(Specification("tasks:Rows", "cprop-sgd", lr=0.1, iterations=50, batch_size=8, precision="bfloat16"))
    train(run, store)
    (done,) = store.runs()
    assert done.column("train_loss")[-1] < 0.1 * done.column("train_loss")[0]
    assert np.isnan(done.column("accuracy")).all()


def test_an_average_of_the_weights_is_what_is_evaluated():
    plain, averaged = (Training(eager(BLOBS.replace(optimizer=name))) for name in ("adam", "adam+ema"))
    for run in (plain, averaged):
        run.advance(40)
    for ours, theirs in zip(plain.model.parameters(), averaged.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # After 40 steps an average over a thousand is still near the start, and worse.
    assert averaged.evaluate()["train_loss"] > plain.evaluate()["train_loss"]


def test_cosine_decay_ends_at_zero():
    run = Training(eager(BLOBS.replace(optimizer="adamw+cosine", iterations=40)))
    run.advance(40)
    assert run.evaluate()["lr"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("base", ["adam", "lion"])  # native, and wrapped
def test_a_late_start_is_the_optimizer_without_cprop_until_there(base):
    late = BLOBS.replace(optimizer=f"cprop-{base}", settings={"cprop_start": 10})
    plain, watching = (Training(eager(run)) for run in (BLOBS.replace(optimizer=base), late))
    for run in (plain, watching):
        run.advance(10)
    for ours, theirs in zip(watching.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert watching.optimizer.param_groups[0]["cprop_c"] == 1
    for run in (plain, watching):
        run.advance(1)
    moved = zip(watching.model.parameters(), plain.model.parameters(), strict=True)
    assert not any(torch.allclose(ours, theirs, rtol=1e-4) for ours, theirs in moved)


def test_which_rows_know_when_the_run_ends():
    """They are run anew at a quarter of the length; the others are read off their curves."""
    names = ("adamw", "adamw+cosine", "adamw+wsd", "muon+inverse", "cprop-adamw+rsqrt+average", "ademamix")
    assert [name for name in names if BLOBS.replace(optimizer=name).optimizer_name.knows_horizon] == [
        "adamw+cosine",
        "adamw+wsd",
        "ademamix",
    ]


def test_a_start_with_the_first_step_is_no_other_run():
    late, usual = (BLOBS.replace(settings=settings) for settings in ({"cprop_start": 0}, {}))
    assert run_id(late) == run_id(usual) != run_id(BLOBS.replace(settings={"cprop_start": 1}))


def a_layers_scale_is_the_same_for_all_of_its_parameters(measure):
    run = Training(eager(BLOBS.replace(settings={"cprop_measure": measure})))
    run.advance(20)
    scales = [scale for _, scale in run.optimizer.scales()]
    assert all(scale.unique().numel() == 1 and 0 < scale.flatten()[0] < 1 for scale in scales)
    assert len({scale.flatten()[0].item() for scale in scales}) > 1


def test_the_mean_over_a_layer_is_the_same_for_all_of_its_parameters():
    a_layers_scale_is_the_same_for_all_of_its_parameters("layer_mean")


@pytest.mark.parametrize(("measure", "power"), [("root_of_s", 0.5), ("square_of_s", 2), ("fourth_power_of_s", 4)])
def test_a_shape_is_a_power_of_the_usual_scale(measure, power):
    moments = Moments.of(torch.linspace(-3, 3, 50), torch.full((50,), 10.0), n=5.0, eps=1e-8)
    torch.testing.assert_close(measures.OWN[measure](moments), measures.conformity(moments) ** power)


def test_numbers_on_record():
    """If this fails, runs made before are other runs now: raise NUMERICS in specification.py, and record anew."""
    recorded = {"sgd": 0.640896, "cprop-sgd": 0.641202, "cprop-adam": 0.203960, "schedule-free-adamw": 0.315669}
    found = {}
    for optimizer in recorded:
        run = Training(eager(BLOBS.replace(optimizer=optimizer)))
        run.advance(40)
        found[optimizer] = run.evaluate()["train_loss"]
    assert all(math.isfinite(loss) for loss in found.values())
    assert found == pytest.approx(recorded, rel=1e-4)


def test_data_are_read_once_for_all_runs_of_a_process(tmp_path):
    """And a run sees nothing of what the one before did to its task."""
    log = tmp_path / "read.log"
    logged = eager(BLOBS.replace(workload="tasks:Logged", options={"log": str(log)}, iterations=2))
    runs = [Training(logged.replace(seed=seed)) for seed in range(3)]
    assert log.read_text().count("data") == 1
    assert len({id(run.task) for run in runs}) == 3
    assert len({id(run.training_data) for run in runs}) == 1
    Training(logged.replace(batch_size=16))
    assert log.read_text().count("data") == 2  # a batch size is part of the task
    failing = eager(BLOBS.replace(workload="tasks:Failing"))
    for seed in range(2):
        with pytest.raises(IndexError):
            Training(failing.replace(seed=seed)).advance(20)
        Training(failing.replace(seed=seed)).advance(9)
