"""What the person at the keyboard sees, in a log and in a narrow terminal."""

import io
import math
import re

import pytest
from rich.console import Console

from cprop_lab.engine.live_table import LiveTable
from cprop_lab.output.tables import Table, folded
from cprop_lab.run.specification import Specification

RUN = Specification("fmnist-cnn", "cprop-sgd", lr=0.1, iterations=400, evaluate_every=100)
HEADS = ["optimizer", "iterations to Adam's last loss", "time of a step", "test accuracy at the end"]
ROWS = [
    ["Schedule-Free AdamW", "reached by 1 of 3", "1.55", "89.10 ± 0.20 %"],
    ["CProp(Adam), averaged", "0.45", "1.50", "89.661 ± 0.054 %"],
]


def row(step, loss=0.5, seconds=2.0):
    return {"step": step, "seconds": seconds, "train_loss": loss}


def test_a_log_tells_runs_of_one_experiment_apart():
    log = io.StringIO()
    table = LiveTable(Console(file=log, width=120))
    runs = [RUN.replace(batch_size=4), RUN.replace(options={"dropout": 0.3})]
    table.phase("selecting learning rates, round 2 of about 3", later=800)
    table.begin(runs, reused=0)
    table.waiting("starting Ray")
    table.waiting("starting Ray")
    for run in runs:
        table.evaluated(run, row(400))
        table.ended(run)
    table.end()
    table.phase("comparing")
    table.begin([], reused=2)
    table.end()
    assert log.getvalue().splitlines() == [
        "selecting learning rates, round 2 of about 3: 2 runs",
        "starting Ray",
        "[25 %] fmnist-cnn (batch size 4) CProp(SGD) lr 0.1 seed 0: training loss 0.5000",
        "[50 %] fmnist-cnn (dropout 0.3) CProp(SGD) lr 0.1 seed 0: training loss 0.5000",
        "comparing: 2 of 2 runs are already finished and are reused",
    ]


def seen(table, width=80):
    text = io.StringIO()
    Console(file=text, width=width).print(table.render())
    return text.getvalue()


def test_one_bar_for_the_whole_command():
    table = LiveTable(Console(file=io.StringIO(), width=80))
    shares = []
    for later, runs in ((1200, [RUN, RUN.replace(seed=1)]), (0, [RUN.replace(iterations=1200)])):
        table.phase("searching" if later else "comparing", later)
        table.begin(runs, reused=0)
        for run in runs:
            for step in range(0, run.iterations + 1, 100):
                table.evaluated(run, row(step))
                shares.append(table.share)
            table.ended(run)
        table.end()
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert "comparing: 1 of 1 runs finished" in seen(table)


def test_the_time_left_follows_from_the_pace(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("cprop_lab.engine.live_table.time.monotonic", lambda: now)
    table = LiveTable(Console(file=io.StringIO(), width=80))
    table.phase("selecting", later=1600)
    table.begin([RUN, RUN.replace(seed=1)], reused=0)
    now += 60  # for Ray to start: no part of the pace
    assert "0 %, 1:00 elapsed" in seen(table)
    assert table.left() == ""
    table.evaluated(RUN, row(200))  # from a checkpoint
    now += 10
    table.evaluated(RUN, row(300))
    assert table.left() == f"about {math.ceil(10 / 100 * (100 + 400 + 1600) / 60)} min left"
    table.ended(RUN)  # early: it diverged, and the rest of its iterations is no work
    assert table.left() == f"about {math.ceil(10 / 100 * (400 + 1600) / 60)} min left"
    assert "17 %, 1:10 elapsed, about 4 min left" in seen(table)
    now += 10
    table.evaluated(RUN.replace(seed=1), {**row(400), "began": 300})  # the only row that was seen of it
    table.ended(RUN.replace(seed=1))
    assert table.left() == f"about {math.ceil(20 / 200 * 1600 / 60)} min left"


@pytest.mark.parametrize("width", [80, 120])
def test_what_a_run_shows(width):
    table = LiveTable(Console(file=io.StringIO(), width=width))
    table.begin([RUN], reused=0)
    assert "starting the runs and reading their data (0:00)" in seen(table, width)
    table.waiting("starting Ray")
    assert "starting Ray (0:00)" in seen(table, width)
    table.evaluated(RUN, row(0, seconds=0.0))
    assert re.search(r"fmnist-cnn +CProp\(SGD\) +0.1 +0 +0 of 400 +0.5000 +compiling", seen(table, width))
    table.evaluated(RUN.replace(optimizer="sgd"), row(0, seconds=0.0))
    assert re.search(r"SGD .* starting", seen(table, width))
    table.evaluated(RUN, row(100))
    assert re.search(r"100 of 400 +0.5000 +20.00", seen(table, width))
    assert "nan" not in seen(table, width)
    assert all(len(line) <= width for line in seen(table, width).splitlines())


def test_what_is_waited_for_is_seen_when_no_run_is_under_way():
    table = LiveTable(Console(file=io.StringIO(), width=80))
    table.begin([RUN], reused=0)
    table.evaluated(RUN, row(100))
    table.waiting("waiting for workers")  # its machine was lost
    assert "waiting for workers (0:00)" in seen(table)
    assert "fmnist-cnn" not in seen(table)
    table.evaluated(RUN, row(200))
    assert re.search(r"fmnist-cnn .* 200 of 400", seen(table))


def test_a_terminal_is_left_as_it_was():
    text = io.StringIO()
    table = LiveTable(Console(file=text, width=80, force_terminal=True))
    table.begin([RUN], reused=0)
    table.evaluated(RUN, row(100))
    table.failed(RUN, "out of memory")
    table.end()
    shown = text.getvalue()
    assert "fmnist-cnn CProp(SGD) lr 0.1 seed 0 failed: out of memory" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")  # the last thing written erases the last line of the bar
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back


def test_a_number_and_its_unit_stay_on_one_line():
    assert folded("it is 95 % sure", 9) == "it is\n95 % sure"


@pytest.mark.parametrize(("width", "tables"), [(60, 1), (50, 2), (10, 3)])
def test_a_wide_table_is_parted_and_not_cut(width, tables):
    text = io.StringIO()
    console = Console(file=text, width=width)
    made = list(Table(HEADS, ROWS).fitting(width))
    assert len(made) == tables
    for table in made:
        console.print(table)
    lines = text.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    if width > 40:  # narrower than a name and a number there is no room for either
        shown = " ".join(lines)
        words = {word for row in (HEADS, *ROWS) for cell in row for word in cell.split()}
        assert words <= set(shown.split())
        assert "…" not in shown
        assert "89.661 ± 0.054 %" in shown
