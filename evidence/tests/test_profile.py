"""The scoreboards of all workloads, in one figure and one table."""

from evidence import profile
from test_scoreboard import ADAM, COSINE, SLOW, keep, store

from cprop_lab.analysis import scoreboard

__all__ = ["store"]  # a fixture


def test_all_workloads_in_one_table_and_one_figure(store):
    quick = [4.0, 0.5, 0.5, 0.5, 0.5]
    losses = {"adam": [ADAM], "adamw+cosine": [COSINE], "sgd": [SLOW], "muon": [quick], "cprop-muon": [quick]}
    entries = scoreboard.score(*keep(store, losses, {}))
    # The second workload is the first without its best row, which therefore is in neither.
    (best, *others) = entries
    boards = {"one": entries, "another": others}
    table = profile.summary(boards)
    assert table.headings == ["optimizer", "score", "one", "another"]
    assert best.name not in [row[0].strip("*") for row in table.rows]
    assert [float(row[1]) for row in table.rows] == sorted((float(row[1]) for row in table.rows), reverse=True)
    assert ["SGD", "0.00", "not reached", "not reached"] in [list(row) for row in table.rows]
    figure = profile.performance_profile(boards)
    bars, lines = figure.axes
    assert [label.get_text() for label in bars.get_yticklabels()] == [row[0].strip("*") for row in table.rows]
    assert len(lines.lines) == len([row for row in table.rows if row[0].strip("*") in profile.SHOWN])


def test_final_losses_of_all_workloads_are_compared_to_those_of_cprops_row(store):
    low = [4.0, 0.02, 0.02, 0.02, 0.02]
    losses = {"adam": [ADAM] * 3, "adamw+cosine": [low] * 3, "cprop-sgd": [SLOW] * 3, "cprop-adam": [COSINE] * 3}
    entries = scoreboard.score(*keep(store, losses, {}))
    boards = {"one": entries, "another": [entry for entry in entries if entry.name != "CProp(SGD)"]}
    compared = {row[0]: row[1].partition(" (")[2] for row in profile.comparison(boards).rows}
    assert compared == {"AdamW, cosine": "0.48 lower)", "**CProp(Adam)**": "", "Adam": "0.5 higher)"}
    figure = profile.final_losses(boards)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [name.strip("*") for name in compared]
    drawn = [
        [loss for line in axes.lines if len(line.get_xdata()) > 1 for loss in line.get_xdata()] for axes in figure.axes
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 9
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
