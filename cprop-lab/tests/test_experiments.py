"""Each figure of the paper is there, with the runs that the paper has."""

from dataclasses import replace

import pytest
from test_selection import Phases

from cprop_lab.engine.engine import Engine
from cprop_lab.experiments import EXPERIMENTS, PRESETS, Variant
from cprop_lab.experiments.presets import Length
from cprop_lab.experiments.rates import PAPER, rate
from cprop_lab.output.figures import draw
from cprop_lab.run.identity import resolve
from cprop_lab.run.names import parse
from cprop_lab.store import Store

NAMES = [
    *("fmnist-fc", "fmnist-cnn", "cifar100-vgg", "cifar100-resnet", "tiny-imagenet-vgg", "tiny-imagenet-resnet"),
    *("ptb-lstm", "ptb-lstm-dropout", "batch-sizes", "overconfidence", "dropout", "scale-histogram", "alternatives"),
    "generalization",
]


def test_all_are_there():
    selections = [f"lr-selection-{workload}" for workload in PAPER]
    boards = ("fmnist-fc", "fmnist-cnn", "ptb-lstm-small", "ptb-transformer", "ptb-transformer-batch-4")
    scoreboards = [f"scoreboard-{board}" for board in (*boards, "ptb-gpt", "ptb-gpt-batch-4")]
    beyond = ["horizon", "overconfidence-lstm", "layer-mean", "shape", "late-start", "late-start-lstm"]
    beyond += ["smaller-rates", "state-formats"]
    assert list(EXPERIMENTS.own) == [*NAMES, *selections, *beyond, *scoreboards]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("experiment", EXPERIMENTS.own.values(), ids=EXPERIMENTS.own)
def test_every_run_of_every_experiment_can_be_specified(experiment, preset):
    specifications = experiment.specifications(preset, {})
    for specification in specifications:
        resolve(specification)  # knows its optimizer's settings
    # A row's own rate is not known before it is selected.
    alike = [
        (v.optimizer, tuple(v.settings.items()), v.options.get("dropout"), v.batch_size, v.workload, v.places, v.lr)
        for v in experiment.variants
    ]
    assert len(set(specifications)) == len(set(alike)) * preset.seeds
    assert {s.iterations // s.evaluate_every for s in specifications} <= set(range(1, 121))


def test_the_papers_learning_rates():
    """Appendix E, and section 4.4 on batch sizes."""
    assert [rate("fmnist-fc", base) for base in ("sgd", "adam", "rmsprop", "amsgrad", "adabound")] == [
        0.1,
        1e-3,
        1e-3,
        1e-3,
        1e-3,
    ]
    assert [rate("fmnist-cnn", "adam", size) for size in (4, 8, 16, 32, 64)] == [1e-3, 1e-3, 3e-3, 3e-3, 3e-3]
    assert [rate("fmnist-cnn", "sgd", size) for size in (4, 64)] == [0.3 / 8, 0.6]
    assert rate("ptb-lstm-dropout", "adam") == 3e-3
    adabound = Variant("cifar100-vgg", "cprop-adabound").specification(PRESETS["paper"], 1e-4)
    assert adabound.settings["final_lr"] == 0.01


def test_smaller_rates_are_places_of_the_grid_below_the_selected_one():
    experiment = EXPERIMENTS["smaller-rates"]
    (sgd,) = {variant.setting() for variant in experiment.only(["sgd"]).variants}  # selected once
    specifications = experiment.only(["sgd"]).specifications(replace(PRESETS["smoke"], seeds=1), {sgd: 0.3})
    assert [(s.optimizer, s.lr) for s in specifications] == [
        ("cprop-sgd", 0.3),
        ("sgd", 0.3),
        ("sgd", 0.09),
        ("sgd", 0.03),
    ]


def test_cprop_has_the_learning_rate_of_its_optimizer():
    """Learning rates are tuned for the plain optimizers alone (section 3), but for a scoreboard's rows that say so."""
    for experiment in EXPERIMENTS.values():
        for variant in experiment.variants:
            assert variant.setting().optimizer == (variant.optimizer if variant.own_rate else variant.base)
            assert variant.own_rate or not parse(variant.setting().optimizer).cprop
            assert variant.setting().guess() == variant.guess()


SMALL = replace(
    PRESETS["smoke"],
    seeds=2,
    lengths={**PRESETS["smoke"].lengths, "fmnist-fc": Length(12, 4, 20, selection=6)},
)


@pytest.mark.slow
def test_an_experiment_is_run_and_says_what_it_was(tmp_path, data_root):
    engine = Engine(Store(tmp_path), executor="process")
    about = EXPERIMENTS["fmnist-fc"].only(["rmsprop"]).run(SMALL, engine.run)
    runs = engine.store.runs(about["runs"])
    assert [(run.specification.optimizer, run.specification.seed) for run in runs] == [
        ("rmsprop", 0),
        ("rmsprop", 1),
        ("cprop-rmsprop", 0),
        ("cprop-rmsprop", 1),
    ]
    assert {run.specification.lr for run in runs} == {1e-3}
    assert list(runs[0].column("step")) == [0, 3, 6, 9, 12]
    assert about["learning_rates"] == {"fmnist-fc rmsprop": 1e-3}
    assert about["reduced"]


@pytest.mark.slow
def test_what_there_is_of_an_unfinished_experiment_can_be_drawn(tmp_path, data_root):
    engine = Engine(Store(tmp_path), executor="process")
    known = {}

    def begun(about, specifications):
        known.update(about, runs=list(engine.by_id(specifications)))

    def stopped(specifications):
        engine.run(specifications[:3])
        raise KeyboardInterrupt

    experiment = EXPERIMENTS["fmnist-fc"].only(["rmsprop"])
    with pytest.raises(KeyboardInterrupt):
        experiment.run(SMALL, stopped, begun=begun)
    runs = engine.store.runs(known["runs"])
    assert [run.specification.optimizer for run in runs] == ["rmsprop", "rmsprop", "cprop-rmsprop"]
    assert draw(known, runs)
    finished = experiment.run(SMALL, engine.run)
    assert {key: finished[key] for key in known} == known


@pytest.mark.slow
def test_with_selected_learning_rates(tmp_path, data_root):
    engine = Engine(Store(tmp_path), executor="process")
    experiment = EXPERIMENTS["fmnist-fc"].only(["rmsprop"])
    told = Phases()
    about = experiment.run(SMALL, engine.run, select=True, progress=told)
    # In the first of about three rounds, two more rates are expected with two seeds, and then both optimizers' runs.
    assert told[0] == ("selecting learning rates, round 1 of about 3", 2 * 2 * 6 + 2 * 2 * 12)
    assert told[-1] == ("running the experiment", 0)
    selection = EXPERIMENTS["lr-selection-fmnist-fc"].only(["rmsprop"]).run(SMALL, engine.run)
    # The selection that the experiment made is the one that stands alone: its runs are found, and not run again.
    assert set(engine.store.finished()) == {*about["runs"], *selection["runs"]}
    (lr,) = about["learning_rates"].values()
    assert {run.specification.lr for run in engine.store.runs(about["runs"])} == {lr}
    assert len(selection["runs"]) >= 2 * 3
    assert all(run.specification.iterations == 6 for run in engine.store.runs(selection["runs"]))


def test_optimizers_that_an_experiment_does_not_have_are_told():
    with pytest.raises(ValueError, match=r"ptb-lstm does not include rmsprop: choose from sgd, adam"):
        EXPERIMENTS["ptb-lstm"].only(["rmsprop"])
