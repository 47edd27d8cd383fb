"""What the person at the keyboard sees, in a log and in a narrow terminal."""

import io

import pytest
from rich.console import Console

from cprop_lab.console import LiveTable, fitting
from cprop_lab.specification import Specification

RUN = Specification("fmnist-cnn", "cprop-sgd", lr=0.1, iterations=400, evaluate_every=100)
HEADS = ["optimizer", "iterations to Adam's last loss", "time of a step", "test accuracy at the end"]
ROWS = [
    ["Schedule-Free AdamW", "reached by 1 of 3", "1.55", "89.10 ± 0.20 %"],
    ["CProp(Adam), averaged", "0.45", "1.50", "89.661 ± 0.054 %"],
]


def test_a_log_tells_runs_of_one_experiment_apart():
    log = io.StringIO()
    table = LiveTable(Console(file=log, width=120))
    runs = [RUN.but(batch_size=4), RUN.but(options={"dropout": 0.3})]
    table.begin(runs, done=0)
    for run in runs:
        table.row(run, {"step": 400, "seconds": 2.0, "train_loss": 0.5})
        table.ended(run)
    table.end()
    assert log.getvalue().splitlines() == [
        "[1/2] fmnist-cnn (batch size 4) CProp(SGD) lr 0.1 seed 0: training loss 0.5000",
        "[2/2] fmnist-cnn (dropout 0.3) CProp(SGD) lr 0.1 seed 0: training loss 0.5000",
    ]


@pytest.mark.parametrize(("width", "tables"), [(60, 1), (50, 2), (10, 3)])
def test_a_wide_table_is_parted_and_not_cut(width, tables):
    text = io.StringIO()
    console = Console(file=text, width=width)
    made = list(fitting(console, HEADS, ROWS))
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
