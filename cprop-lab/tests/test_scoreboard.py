"""The scoreboard puts optimizers in order as its rules say, and the rules say what is run."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_experiments import SMALL
from test_figures import specification, write
from test_selection import Phases

from cprop_lab import workloads
from cprop_lab.analysis import scoreboard
from cprop_lab.analysis.curves import seconds_per_step, undisturbed_seconds_per_step
from cprop_lab.analysis.groups import by_seed, names
from cprop_lab.engine.engine import Engine
from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.experiments import scoreboard as protocol
from cprop_lab.output import figures, tables
from cprop_lab.output.drawing import to_svg
from cprop_lab.output.report import write as write_page
from cprop_lab.run.names import parse
from cprop_lab.store import Store

RULES = (Path(__file__).parents[2] / "docs" / "results" / "scoreboard-rules.md").read_text()

TARGETS = ("adam", "adamw+cosine")

# Losses at 0, 100, 200, 300 and 400 of 400 iterations. Targets are means of the last three.
ADAM = [4.0, 1.0, 1.0, 1.0, 1.0]
COSINE = [4.0, 2.0, 0.5, 0.5, 0.5]
FAST = [1.0, 1.0, 0.1, 0.1, 0.1]
SLOW = [4.0, 4.0, 4.0, 4.0, 4.0]


def flat(*losses):
    """By seed, losses that stay where they are from the second evaluation on."""
    return [[4.0, *[loss] * 4] for loss in losses]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def keep(store, losses, step_seconds):
    """Runs and timings of some optimizers, by name: the losses of each seed, and the seconds of a step."""
    runs = [
        write(store, specification(name, seed), own, metrics=[0.5, 0.6, 0.7, 0.8, 0.9])
        for name, by_seed in losses.items()
        for seed, own in enumerate(by_seed)
    ]
    timings = [
        write(store, protocol.timing(specification(name), 20), [3.0] * 5, step_seconds=seconds)
        for name, seconds in step_seconds.items()
    ]
    rows = by_seed(store.runs(runs))
    return {names(rows)[group]: own for group, own in rows.items()}, TARGETS, store.runs(timings)


@pytest.fixture
def entries(store):
    losses = {
        "adam": [ADAM, ADAM],
        "adamw+cosine": [COSINE, COSINE],
        "sgd": [SLOW, SLOW],
        "cprop-sgd": [FAST, SLOW],
        "cprop-adam": [FAST, FAST],
    }
    seconds = {"adam": 0.01, "adamw+cosine": 0.01, "sgd": 0.005, "cprop-sgd": 0.01, "cprop-adam": 0.02}
    return scoreboard.score(*keep(store, losses, seconds))


def test_scores_are_parts_of_the_run_and_of_adams_time(entries):
    by_name = {entry.name: entry for entry in entries}
    assert by_name["CProp(Adam)"].part(0) == pytest.approx(0.0)  # it begins below the target
    # Averaged over three rows, it passes 0.5 between 200 (0.7) and 300 (0.4).
    assert by_name["CProp(Adam)"].part(1) == pytest.approx((200 + 100 * 0.2 / 0.3) / 400)
    assert by_name["CProp(Adam)"].part(1, "seconds") == pytest.approx(2 * by_name["CProp(Adam)"].part(1))
    assert by_name["Adam"].part(0) <= 1.0
    assert by_name["Adam"].part(1) == math.inf
    assert by_name["SGD"].part(0, "seconds") == math.inf
    assert by_name["CProp(SGD)"].part(0) == math.inf  # the median of a seed that got there and one that did not
    assert by_name["SGD"].cost == pytest.approx(0.5)


def test_a_run_that_diverged_has_reached_nothing_and_sets_no_target(store):
    """Rule 13, and for the baseline itself."""
    losses = {"adam": [ADAM], "adamw+cosine": [COSINE], "sgd": [FAST]}
    rows, targets, timings = keep(store, losses, {"adam": 0.01})
    blown = {**rows, "SGD": [replace(run, status="diverged") for run in rows["SGD"]]}
    (row,) = (entry for entry in scoreboard.score(blown, targets, timings) if entry.name == "SGD")
    assert row.iterations == [[math.inf], [math.inf]]
    blown = {**rows, "Adam": [replace(run, status="diverged") for run in rows["Adam"]]}
    assert all(entry.iterations[0] == [math.inf] for entry in scoreboard.score(blown, targets, timings))


def test_a_seed_without_a_target_is_left_out(store):
    rows, targets, timings = keep(store, {"adam": [ADAM], "adamw+cosine": [COSINE], "sgd": [FAST, SLOW]}, {})
    (row,) = (entry for entry in scoreboard.score(rows, targets, timings) if entry.name == "SGD")
    assert [len(parts) for parts in row.iterations] == [1, 1]
    assert len(row.end()) == 2


def test_the_shorter_horizon_is_a_run_of_its_own_or_the_beginning_of_the_long_one(store):
    rows, targets, timings = keep(store, {"adam": [ADAM], "adamw+cosine": [COSINE]}, {})
    short = {"AdamW, cosine": [write(store, specification("adamw+cosine").replace(iterations=100), [4.0, 0.7])]}
    short = {name: store.runs(ids) for name, ids in short.items()}
    entries = {entry.name: entry for entry in scoreboard.score(rows, targets, timings, short)}
    assert entries["Adam"].early() == [pytest.approx(2.5)]  # after 100 of 400 iterations, the mean of 4 and 1
    assert entries["AdamW, cosine"].early() == [pytest.approx(2.35)]


def test_rows_that_three_seeds_cannot_tell_apart_get_more(store):
    losses = {"adam": flat(1.0, 1.1, 1.2), "cprop-adam": flat(0.95, 1.15, 1.1)}  # by less than a deviation
    losses |= {"sgd": flat(3.0, 3.1, 3.2), "cprop-sgd": flat(2.0, 2.1, 2.2)}
    rows, _, _ = keep(store, losses, {})
    pairs = [("Adam", "CProp(Adam)"), ("SGD", "CProp(SGD)"), ("SGD", "not run")]
    assert scoreboard.undecided(rows, pairs) == {"Adam", "CProp(Adam)"}
    assert not scoreboard.difference(rows["CProp(Adam)"], rows["Adam"]).counts
    found = scoreboard.difference(rows["CProp(SGD)"], rows["SGD"])
    assert found.counts
    assert found.mean == pytest.approx(1.0)


def test_a_row_with_cprop_is_compared_with_the_one_without(store):
    losses = {"adam": flat(1.0, 1.2), "cprop-adam": flat(0.7, 0.9), "adamw+cosine": flat(1.0, 1.0)}
    losses |= {"sgd": flat(2.0, 2.1), "cprop-sgd": flat(2.2, 1.9), "lion": flat(1.0, 1.0), "cprop-lion": flat(1.5, 1.4)}
    rows, targets, timings = keep(store, losses, {})
    rows["CProp(Lion)"][0] = replace(rows["CProp(Lion)"][0], status="diverged")
    entries = scoreboard.score(rows, targets, timings)
    gains = {entry.name: str(scoreboard.gain(entry, entries) or "") for entry in entries}
    assert gains == {
        **dict.fromkeys(("Adam", "AdamW, cosine", "SGD", "Lion"), ""),
        "CProp(Adam)": "0.3 lower",
        "CProp(SGD)": "tie",
        "CProp(Lion)": "inf higher",
    }


def test_a_row_with_a_rate_of_its_own_is_compared_with_one_that_has_it_too(store):
    losses = {"adam": flat(1.0, 1.0), "adamw+cosine": flat(1.0, 1.0), "cprop-adam": flat(0.5, 0.5)}
    rows, targets, timings = keep(store, losses, {})
    rows["CProp(Adam), own rate"] = rows["CProp(Adam)"]

    def gains():
        entries = scoreboard.score(rows, targets, timings)
        return [str(scoreboard.gain(entry, entries)) for entry in entries if "CProp" in entry.name]

    assert gains() == ["0.5 lower", "0.5 lower"]
    better = [write(store, specification("adam", seed, lr=0.3), own) for seed, own in enumerate(flat(0.7, 0.7))]
    rows["Adam, own rate"] = store.runs(better)
    assert sorted(gains()) == ["0.2 lower", "0.5 lower"]


def test_a_measure_is_a_row_of_its_own_and_is_timed_by_itself(store):
    settings = {"cprop_measure": "layer_mean", "fused": False}
    rows, targets, timings = keep(store, {"adam": [ADAM], "adamw+cosine": [COSINE]}, {"adam": 0.01, "cprop-adam": 0.02})
    layer = specification("cprop-adam", settings=settings)
    slow = write(store, protocol.timing(layer, 20), [3.0] * 5, step_seconds=0.04)
    for run in (specification("cprop-adam"), layer):
        rows[run.label] = store.runs([write(store, run, FAST)])
    costs = {entry.name: entry.cost for entry in scoreboard.score(rows, targets, [*timings, *store.runs([slow])])}
    assert costs["CProp(Adam)"] == pytest.approx(2)
    assert costs["CProp(Adam), layer mean"] == pytest.approx(4)


def test_the_profile_is_a_multiple_of_the_fastest(entries):
    found = scoreboard.profile([entries, entries], target=1)
    assert found["CProp(Adam)"] == [1.0, 1.0]
    assert found["AdamW, cosine"][0] > 1
    assert found["SGD"] == [math.inf, math.inf]
    without = [entry for entry in entries if entry.name != "SGD"]
    assert "SGD" not in scoreboard.profile([entries, without], target=1)


def test_a_perplexity_beyond_all_others_is_written_and_not_drawn(store):
    ends = {"adam": 140.0, "adamw+cosine": 150.0, "sgd": 7e11}
    runs = store.runs(
        [write(store, specification(name), ADAM, metric="perplexity", metrics=[end] * 5) for name, end in ends.items()]
    )
    entries = scoreboard.score({run.specification.label: [run] for run in runs}, TARGETS)
    beside = figures.scoreboard(entries).axes[-1]
    assert [text.get_text() for text in beside.texts] == ["7.0e+11"]
    assert beside.get_xlim()[1] < 200


def test_the_order_is_that_of_the_scores(entries):
    assert entries[0].name == "CProp(Adam)"
    assert {entry.name for entry in entries[-2:]} == {"SGD", "CProp(SGD)"}


def test_the_table_says_who_did_not_get_there(entries):
    table = tables.scoreboard(entries)
    heads, rows = table.headings, table.rows
    assert all(len(row) == len(heads) for row in rows)
    cells = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    target = "iterations to Adam's final loss"
    assert cells["SGD"][target] == "not reached"
    assert cells["CProp(SGD)"][target] == "reached by 1 of 2"
    assert cells["Adam"]["final test accuracy"] == "80 %"


@pytest.mark.slow
def test_the_figure_has_a_row_an_optimizer(entries):
    figure = figures.scoreboard(entries, "A title")
    first, second, generalisation = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == [entry.name for entry in entries]
    assert "not reached" in {text.get_text() for text in second.texts}
    assert "test accuracy" in generalisation.get_title(loc="left")
    assert to_svg(figure).startswith("<svg")


def test_without_its_optimizer_there_is_no_target(store):
    with pytest.raises(ValueError, match=r"no run of adam is finished, whose final training loss is .*: include it"):
        scoreboard.score(*keep(store, {"sgd": [SLOW]}, {"sgd": 0.01}))


def test_seconds_of_a_step_are_not_moved_by_a_disturbance(store):
    rows, _, _ = keep(store, {"adam": [ADAM]}, {})
    (run,) = rows["Adam"]
    assert seconds_per_step(run) == pytest.approx(0.01)
    assert undisturbed_seconds_per_step(run) == pytest.approx(0.01)


def test_the_fastest_stretch_counts_but_not_the_first():
    """In the first, one step less is timed."""
    curves = {"step": [0, 10, 20, 30], "seconds": [0.0, 0.05, 0.25, 0.35]}
    assert undisturbed_seconds_per_step(SimpleNamespace(column=curves.get)) == pytest.approx(0.01)


@pytest.mark.slow
def test_a_scoreboard_is_tuned_run_and_shown(tmp_path, data_root):
    engine = Engine(Store(tmp_path), executor="process", eager=True)
    chosen = EXPERIMENTS["scoreboard-fmnist-fc"].only(["adamw", "adamw+cosine", "sgd"])
    told = Phases()
    about = chosen.run(replace(SMALL, seeds=3), engine.run, select=True, progress=told)
    runs, timings = engine.store.runs(about["runs"]), engine.store.runs(about["timings"])
    assert [phase for phase, _ in told if "learning rates" not in phase] == [
        "selecting weight decay",
        "running the experiment",
        "more seeds for rows that are close to each other",
        "shorter runs of rows that know when they end",
        "timing steps",
    ]
    entries = {entry.name: entry for entry in scoreboard.scores(about, runs, timings)}
    assert set(entries) == {
        *("SGD", "CProp(SGD)", "AdamW", "CProp(AdamW)", "CProp(AdamW), own rate"),
        *("AdamW, averaged", "CProp(AdamW), averaged", "AdamW, cosine", "CProp(AdamW), cosine"),
    }
    inherits = entries["CProp(AdamW)"].specification
    assert inherits.lr == entries["AdamW"].specification.lr
    assert inherits.settings["weight_decay"] == entries["AdamW"].specification.settings["weight_decay"]
    assert set(about["short"]) == {"AdamW, cosine", "CProp(AdamW), cosine"}
    (length,) = {run.specification.iterations for run in entries["AdamW, cosine"].short}
    assert length == entries["AdamW"].specification.iterations // scoreboard.HORIZON
    (tuning_seed,) = protocol.SELECTION_SEEDS
    assert tuning_seed not in {run.specification.seed for run in runs}
    tuning = [run.specification for run in engine.store.runs() if run.specification.seed == tuning_seed]
    assert {specification.iterations for specification in tuning} == {length}
    assert scoreboard.scores(about, runs[1:], timings) == []
    engine.store.write_experiment("scoreboard", {**about, "command": "cprop-lab run scoreboard-fmnist-fc"})
    write_page(engine.store, tmp_path / "page.html")
    assert "<h3>Scores</h3>" in (tmp_path / "page.html").read_text()


def test_averaged_weights_take_the_learning_rate_of_what_they_average():
    variants = EXPERIMENTS["scoreboard-fmnist-fc"].variants
    by_row = {(variant.optimizer, variant.own_rate): variant.setting() for variant in variants}
    assert by_row["cprop-adamw+average", False] == by_row["adamw", False] == by_row["cprop-adamw", False]
    assert by_row["cprop-adamw+cosine", False] == by_row["adamw+cosine", False] != by_row["adamw", False]
    assert by_row["cprop-adamw", True].optimizer == "cprop-adamw"


def test_the_rules_say_what_is_run():
    lengths = PRESETS["reduced"].lengths
    sentence = " ".join(RULES.split())
    for workload in ("fmnist-fc", "fmnist-cnn", "ptb-lstm-small", "ptb-transformer", "ptb-gpt"):
        length = lengths[workload]
        assert f"{length.iterations:,}" in sentence
        assert length.precision == "float32"
        (experiment,) = (e for e in EXPERIMENTS.values() if e.name == f"scoreboard-{workload}")
        assert {variant.optimizer for variant in experiment.variants} == set(protocol.OPTIMIZERS)
    assert PRESETS["reduced"].seeds == protocol.FEWEST_SEEDS == 3
    decays = [f"{decay:g}" for decay in protocol.WEIGHT_DECAYS]
    assert f"weight decays of {decays[0]}, {decays[1]} and {decays[2]}" in sentence
    assert f"seed {protocol.SELECTION_SEEDS[0]}" in sentence
    assert "three times its standard error" in sentence
    assert scoreboard.COUNTS == 3
    for optimizer in protocol.OPTIMIZERS:
        assert parse(optimizer).recipe.title.split()[0] in sentence
    warmup = workloads.build("ptb-gpt", {}).warmup
    assert f"over the first {warmup} steps" in sentence
