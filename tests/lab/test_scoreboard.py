"""The scoreboard puts optimizers in order as its rules say, and the rules say what is run."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_experiments import SMALL
from test_figures import specification, write
from test_learning_rate import Phases

from cprop_lab.analysis import scoreboard
from cprop_lab.analysis.curves import seconds_per_step
from cprop_lab.engine.engine import Engine
from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.experiments import scoreboard as protocol
from cprop_lab.output import figures, tables
from cprop_lab.output.drawing import to_svg
from cprop_lab.output.page import write as write_page
from cprop_lab.store import Store

RULES = (Path(__file__).parents[2] / "docs" / "results" / "scoreboard.md").read_text()

# Losses at 0, 100, 200, 300 and 400 of 400 iterations. Targets are means of the last three.
ADAM = [4.0, 1.0, 1.0, 1.0, 1.0]
COSINE = [4.0, 2.0, 0.5, 0.5, 0.5]
FAST = [1.0, 1.0, 0.1, 0.1, 0.1]
SLOW = [4.0, 4.0, 4.0, 4.0, 4.0]


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
    return store.runs(runs), store.runs(timings)


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
    """Rule 9, and for Adam itself."""
    losses = {"adam": [ADAM], "adamw+cosine": [COSINE], "sgd": [FAST]}
    runs, timings = keep(store, losses, {"adam": 0.01})
    blown = [replace(run, status="diverged") if run.specification.optimizer == "sgd" else run for run in runs]
    (row,) = (entry for entry in scoreboard.score(blown, timings) if entry.name == "SGD")
    assert row.iterations == [[math.inf], [math.inf]]
    blown = [replace(run, status="diverged") if run.specification.optimizer == "adam" else run for run in runs]
    assert all(entry.iterations[0] == [math.inf] for entry in scoreboard.score(blown, timings))


def test_the_order_is_that_of_the_scores(entries):
    assert entries[0].name == "CProp(Adam)"
    assert {entry.name for entry in entries[-2:]} == {"SGD", "CProp(SGD)"}


def test_the_table_says_who_did_not_get_there(entries):
    table = tables.scoreboard(entries)
    heads, rows = table.headings, table.rows
    assert all(len(row) == len(heads) for row in rows)
    cells = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    target = f"iterations {scoreboard.TARGETS[0].title}"
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


def test_without_adam_there_is_no_target(store):
    runs, timings = keep(store, {"sgd": [SLOW]}, {"sgd": 0.01})
    with pytest.raises(ValueError, match="no run of adam is finished, whose final training loss is"):
        scoreboard.score(runs, timings)


def test_seconds_of_a_step_are_not_moved_by_a_disturbance(store):
    (run,), _ = keep(store, {"adam": [ADAM]}, {})
    assert seconds_per_step(run) == pytest.approx(0.01)


@pytest.mark.slow
def test_a_scoreboard_is_run_and_shown(tmp_path, data_root):
    engine = Engine(Store(tmp_path), executor="process")
    chosen = EXPERIMENTS["scoreboard-fmnist-fc"].only(["adam", "adamw", "adamw+cosine"])
    told = Phases()
    about = chosen.run(SMALL, engine.run, select=False, progress=told)
    runs, timings = engine.store.runs(about["runs"]), engine.store.runs(about["timings"])
    assert len(timings) / protocol.TIMINGS == len(chosen.variants) == len(runs) / SMALL.seeds
    assert told == [("running the experiment", sum(r.specification.iterations for r in timings)), ("timing steps", 0)]
    decays = {run.specification.optimizer: run.specification.settings.get("weight_decay") for run in runs}
    assert decays["cprop-adamw"] == 0.01
    assert not decays["adam"]
    assert {entry.name for entry in scoreboard.scores(about, runs, timings)} == {
        *("Adam", "CProp(Adam)", "Adam, averaged", "CProp(Adam), averaged"),
        *("AdamW", "CProp(AdamW)", "AdamW, cosine", "CProp(AdamW), cosine"),
    }
    assert scoreboard.scores(about, runs[1:], timings) == []
    engine.store.write_experiment("scoreboard", {**about, "command": "cprop-lab run scoreboard-fmnist-fc"})
    write_page(engine.store, tmp_path / "page.html")
    assert "<h3>Scores</h3>" in (tmp_path / "page.html").read_text()


def test_averaged_weights_take_the_learning_rate_of_what_they_average():
    by_row = {variant.optimizer: variant for variant in EXPERIMENTS["scoreboard-fmnist-fc"].variants}
    assert by_row["cprop-adam+ema"].setting() == by_row["adam"].setting()
    assert by_row["cprop-adamw+cosine"].setting() == by_row["adamw+cosine"].setting() != by_row["adamw"].setting()
    assert by_row["cprop-adamw"].setting() == by_row["adamw"].setting() != by_row["adam"].setting()


def test_the_rules_say_what_is_run():
    lengths = PRESETS["reduced"].lengths
    sentence = " ".join(RULES.split())
    for workload, seeds in (("fmnist-fc", "three seeds"), ("fmnist-cnn", "three seeds"), ("ptb-lstm", "one seed")):
        assert f"({lengths[workload].iterations:,} iterations, {seeds}" in sentence
        assert f"scoreboard-{workload}" in EXPERIMENTS
    assert f"({lengths['fmnist-fc'].selection:,} iterations; {lengths['ptb-lstm'].selection} on Penn" in sentence
    assert lengths["ptb-lstm"].precision == "bfloat16"
    assert lengths["fmnist-fc"].selection == lengths["fmnist-cnn"].selection
    assert f"Weight decay is {protocol.WEIGHT_DECAY} for AdamW" in sentence
    for title in ("Schedule-Free AdamW", "Cautious AdamW", "Prodigy", "Lion", "AdaBelief"):
        assert re.search(title, sentence)
