"""Figures say what the runs say: one line a group, its spread, and what diverged."""

import math
import zlib

import numpy as np
import pytest
from matplotlib.colors import to_hex

from cprop_lab.analysis import pairs as targets
from cprop_lab.output import drawing, figures
from cprop_lab.run.evaluation import BINS
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

STEPS = (0, 100, 200, 300, 400)
MADE = {
    "commit": "0123abc",
    "torch": "2.13.0",
    "device": "cpu",
    "threads": 1,
    "finished": "2026-01-02T03:04:05+00:00",
}


def specification(optimizer, seed=0, **changes):
    values = {"workload": "fmnist-fc", "lr": 0.1, "iterations": STEPS[-1], "evaluate_every": 100, **changes}
    return Specification(optimizer=optimizer, seed=seed, **values)


def write(store, run, losses, status="finished", metric="accuracy", metrics=None, step_seconds=0.01, made=MADE):
    """Keep a run that has these training losses; a test loss is one more, scales fall where there is CProp."""
    rows = []
    for step, loss, value in zip(STEPS, losses, metrics or [0.5] * len(losses), strict=False):
        row = {"step": step, "seconds": step * step_seconds, "train_loss": loss, "test_loss": loss + 1, "lr": run.lr}
        row[metric] = value
        if run.optimizer.startswith("cprop") and step:
            shares = np.zeros(BINS)
            shares[[0, BINS - 1]] = 0.75, 0.25
            row |= {"mean_scale": 10 / step, "scale_histogram": shares.tolist()}
        rows.append(row)
    store.write(run, status, rows, made)
    return run_id(run)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def make(store):
    """Runs with the losses that are given, by specification."""

    def make(losses, **details):
        return store.runs([write(store, run, values, **details) for run, values in losses.items()])

    return make


def lines_of(axes):
    """Lines that are curves, and not the ends of runs that diverged."""
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def draws(figure):
    """Nothing warns and nothing fails when it is laid out."""
    figure.draw_without_rendering()
    return figure


def pair(losses, scaled):
    return {
        specification(name, seed): values
        for name, group in {"sgd": losses, "cprop-sgd": scaled}.items()
        for seed, values in enumerate(group)
    }


# Curves.


def test_runs_that_differ_in_their_seed_are_one_line_with_an_area(make):
    runs = make(pair([[8, 4, 2, 2, 1], [8, 6, 4, 2, 3]], [[8, 2, 1, 1, 1], [8, 2, 1, 1, 1]]))
    figure = draws(figures.curves(runs, title="A title"))
    loss, _, scale = figure.axes
    plain, scaled = lines_of(loss)
    assert list(plain.get_xdata()) == list(STEPS)
    assert list(plain.get_ydata()) == [8, 5, 3, 2, 2]
    area = loss.collections[0].get_paths()[0].vertices
    assert area[np.isclose(area[:, 0], 100)][:, 1].tolist() == pytest.approx([5 - math.sqrt(2), 5 + math.sqrt(2)])
    assert [axes.get_ylabel() for axes in figure.axes] == ["training loss", "test accuracy", "mean scale"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"iterations"}
    assert legend_of(figure) == ["SGD", "CProp(SGD)"]
    assert figure.get_suptitle() == "A title"
    assert len(lines_of(scale)) == 1  # without CProp there is no scale
    # The same colour, told apart by the dashes.
    assert plain.get_color() == scaled.get_color() == "#0072B2"
    assert (plain.get_linestyle(), scaled.get_linestyle()) == ("--", "-")


def test_losses_are_logarithmic_where_they_can_be(make):
    runs = make({specification("sgd"): [8, 4, 2, 2, 1]})
    loss, accuracy = draws(figures.curves(runs)).axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    (loss,) = figures.curves(make({specification("adam"): [8, 4, 2, 0, 0]}), ["train_loss"]).axes
    assert loss.get_yscale() == "linear"


def test_a_line_that_fell_apart_leaves_room_for_the_others(make):
    runs = make({specification("sgd"): [8, 4, 2, 2, 1], specification("adam"): [8, 4, 1e6, 1e6, 1e6]})
    low, high = draws(figures.curves(runs)).axes[0].get_ylim()
    assert 0.5 < low < 1
    assert 8 < high < 10


def test_panels_that_no_run_has_are_left_out(make):
    runs = make({specification("sgd", workload="ptb-lstm"): [8, 4, 2, 2, 1]}, metric="perplexity", metrics=[90] * 5)
    figure = figures.curves(runs)
    assert [axes.get_ylabel() for axes in figure.axes] == ["training loss", "test perplexity"]
    with pytest.raises(ValueError, match="no run has a column mean_scale: pass finished runs"):
        figures.curves(runs, ["mean_scale"])
    with pytest.raises(ValueError, match="pass finished runs"):
        figures.curves([])


@pytest.mark.slow
def test_a_row_for_each_workload_option_and_batch_size(make):
    losses = [8, 4, 2, 2, 1]
    runs = make({specification("sgd"): losses, specification("sgd", batch_size=64): losses})
    runs += make({specification("sgd", workload="fmnist-cnn", options={"dropout": 0.3}): losses})
    runs += make({specification("sgd", workload="ptb-lstm"): losses}, metric="perplexity", metrics=[9] * 5)
    figure = draws(figures.curves(runs, ["accuracy", "train_loss"]))
    assert [axes.get_title("left") for axes in figure.axes[::2]] == [
        "fmnist-fc (batch size 32)",
        "fmnist-fc (batch size 64)",
        "fmnist-cnn (dropout 0.3, batch size 32)",
        "ptb-lstm (batch size 32)",
    ]
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == [*["test accuracy"] * 3, "test perplexity"]
    assert legend_of(figure) == ["SGD"]  # once for all rows


def test_a_run_that_diverged_goes_as_far_as_it_got(make):
    runs = make({specification("sgd", 0): [8, 4, 2, 2, 1]})
    runs += make({specification("sgd", 1): [8, 6, 90], specification("sgd", 2): [8, 5, math.nan]}, status="diverged")
    figure = draws(figures.curves(runs, ["train_loss"]))
    (axes,) = figure.axes
    (line,) = lines_of(axes)
    assert list(line.get_ydata()) == [8, 5, 2, 2, 1]  # the mean over those that are there
    crosses = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[[200, 90]], [[100, 5]]]
    assert legend_of(figure) == ["SGD (diverged: 2 of 3)"]


def test_all_diverged_at_once(make):
    runs = make({specification("cprop-sgd"): [8], specification("sgd"): [math.nan]}, status="diverged")
    assert legend_of(draws(figures.curves(runs))) == [
        "SGD (diverged: 1 of 1)",
        "CProp(SGD) (diverged: 1 of 1)",
    ]


@pytest.mark.parametrize(
    ("setting", "called", "values"), [("cprop_c", "c", (10.0, 1.0, 3.0)), ("cprop_beta", "beta", (0.9999, 0.9, 0.999))]
)
def test_variants_of_cprop_are_told_apart(make, setting, called, values):
    losses = [8, 4, 2, 2, 1]
    variants = [specification("cprop-sgd", settings={setting: value}) for value in values]
    figure = figures.curves(make(dict.fromkeys([specification("sgd"), *variants], losses)))
    assert legend_of(figure) == ["SGD", *(f"CProp(SGD), {called} = {value:g}" for value in sorted(values))]
    assert len({to_hex(line.get_color()) for line in lines_of(figure.axes[0])}) == 4


def test_what_else_differs_is_told(make):
    runs = make({specification("sgd", lr=lr): [8, 4, 2, 2, 1] for lr in (0.3, 0.1)})
    assert legend_of(figures.curves(runs)) == ["SGD, learning rate 0.1", "SGD, learning rate 0.3"]


@pytest.mark.slow
def test_more_optimizers_than_colours_are_still_told_apart(make):
    bases = ["sgd", "adam", "rmsprop", "amsgrad", "adabound", "adamw", "lion", "prodigy"]
    figure = figures.curves(make({specification(base): [8, 4, 2, 2, 1] for base in bases}))
    looks = {(line.get_color(), line.get_marker()) for line in lines_of(figure.axes[0])}
    assert len(looks) == len(bases)


# The other figures.


def test_the_scales_distribution(make):
    runs = make(pair([[8, 4, 2, 2, 1]], [[8, 2, 1, 1, 1]]))
    figure = draws(figures.histogram(runs, "Scales"))
    image, mean, _ = figure.axes
    (mesh,) = image.collections
    assert mesh.get_array().shape == (len(STEPS) - 1, BINS)  # before the first step there is no scale
    assert np.asarray(mesh.get_array())[:, [0, -1]].tolist() == [[0.75, 0.25]] * (len(STEPS) - 1)
    assert image.get_title("left") == "CProp(SGD)"
    assert "start at the bottom" in image.get_ylabel()
    assert image.get_ylim()[0] < image.get_ylim()[1]
    assert mean.lines[0].get_xydata().tolist() == [[0.1, 100], [0.05, 200], [pytest.approx(1 / 30), 300], [0.025, 400]]
    with pytest.raises(ValueError, match="optimizers with CProp"):
        figures.histogram(runs[:1])


def test_the_best_learning_rate_is_marked(make):
    found = {specification("sgd", seed, lr=lr): [8, e, e, e] for lr, e in ((0.1, 2), (0.3, 0.25)) for seed in (0, 1)}
    runs = make({**found, specification("adam", lr=0.001): [8, 3, 3, 3]})
    runs += make({specification("sgd", 0, lr=1.0): [8, 90]}, status="diverged")
    runs += make({specification("sgd", 1, lr=1.0): [8, 0.1, 0.1, 0.1]})
    figure = draws(figures.learning_rates(runs, "Rates"))
    sgd, adam = figure.axes
    assert [axes.get_title("left") for axes in (sgd, adam)] == ["SGD", "Adam"]
    assert sgd.get_xscale() == "log"
    assert [text.get_text() for text in sgd.texts] == ["best: 0.3, loss 0.25"]  # one good seed of two is not the best
    (ring,) = [line for line in sgd.lines if line.get_markerfacecolor() == "none"]
    assert ring.get_xydata().tolist() == [[0.3, 0.25]]
    (cross,) = [line for line in sgd.lines if line.get_marker() == "x"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (1.0, 0.95)
    assert legend_of(figure) == ["the best", "a seed diverged"]
    with pytest.raises(ValueError, match="no runs"):
        figures.learning_rates([])


def test_many_searches_for_learning_rates_have_a_row_each(make):
    settings = [{"beta1": 0.9 + i / 1000} for i in range(figures.PANELS + 1)]
    found = {
        specification("adam", lr=lr, settings=own): [8, 20 * lr + 1 / (i + 1)]
        for i, own in enumerate(settings)
        for lr in (0.1, 0.3)
    }
    runs = make(found | {specification("adam", lr=1e-3, settings=settings[1]): [8, 80]})  # nothing learnt
    runs += make({specification("adam", lr=1.0, settings=settings[0]): [8, 90]}, status="diverged")
    (axes,) = draws(figures.learning_rates(runs)).axes
    lowest_first = [label.get_text() for label in axes.get_yticklabels()]
    assert (lowest_first[0], lowest_first[-1]) == ("Adam, beta1 = 0.912", "Adam")
    assert [len(line.get_xdata()) for line in axes.lines] == [0, len(settings), len(settings), 0]
    caption = axes.figure.legends[0].get_title().get_text()
    assert caption == "learning rate; one seed; no dot where a seed diverged or the loss is above 28"
    none = make({specification("adam", settings=own): [8, 90] for own in settings}, status="diverged")
    assert not [x for line in draws(figures.learning_rates(none)).axes[0].lines for x in line.get_xdata()]


def test_given_learning_rates_have_a_row_for_each_optimizer(make):
    runs = make({specification(name, lr=lr): [8, 20 * lr] for name in ("sgd", "adam") for lr in (0.1, 0.3)})
    manifest = {"title": "Rates", "kind": "rates", "preset": "smoke", "reduced": False}
    (axes,) = draws(figures.draw(manifest, runs)[""]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["SGD", "Adam"]
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 2]


def test_learning_rates_that_all_diverged(make):
    runs = make({specification("sgd"): [8, 90]}, status="diverged")
    assert not draws(figures.learning_rates(runs)).axes[0].texts


# Worked out by hand, with losses averaged over three rows: without CProp 8, 6, 14/3, 8/3, 2, so the target is 2 and is
# reached at 400; with it 8, 5, 4, 2 reaches it at 300, and 8, 8, 6, 4, 2 at 400.
PLAIN = [8, 4, 2, 2, 2]
FASTER = [8, 2, 2, 2, 2]
AS_FAST = [8, 8, 2, 2, 2]
NEVER = [8, 8, 8, 8, 8]


def test_times_to_target(make):
    pairs = targets.pairs(make(pair([PLAIN, PLAIN], [FASTER, AS_FAST])))
    figure = draws(figures.times_to_target(pairs))
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.875, 0.875]
    assert [text.get_text() for text in axes.texts] == ["0.88 ± 0.18"] * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CProp(SGD)"]
    assert [sorted(line.get_xdata()) for line in axes.lines] == [[1, 1], [0.75, 1], [0.75, 1]]
    assert legend_of(figure) == ["iterations", "seconds", "as long as without CProp"]
    with pytest.raises(ValueError, match="no pairs"):
        figures.times_to_target({})


@pytest.mark.parametrize(
    ("scaled", "text"),
    [([NEVER, NEVER], "not reached"), ([FASTER, NEVER], "not reached by 1 of 2")],
)
def test_a_target_that_was_not_reached_is_told_and_has_no_mean(make, scaled, text):
    figure = draws(figures.times_to_target(targets.pairs(make(pair([PLAIN, PLAIN], scaled)))))
    assert [found.get_text() for found in figure.axes[0].texts] == [text] * 2
    assert not figure.axes[0].patches


def test_without_cprop_it_diverged(make):
    runs = make({specification("sgd", 0): [8, 90]}, status="diverged")
    runs += make(
        {specification("sgd", 1): PLAIN, specification("cprop-sgd", 0): FASTER, specification("cprop-sgd", 1): FASTER}
    )
    figure = draws(figures.times_to_target(targets.pairs(runs)))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.75, 1 of 2 did not learn without CProp"] * 2


# Files.


@pytest.mark.slow
def test_the_same_figure_makes_the_same_file(make, tmp_path):
    runs = make(pair([PLAIN], [FASTER]))
    texts = [drawing.to_svg(figures.histogram(runs)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("<svg")
    for name in ("figure.svg", "folder/figure.png"):
        contents = []
        for _ in range(2):
            drawing.save(figures.curves(runs), tmp_path / name)
            contents.append(zlib.crc32((tmp_path / name).read_bytes()))
        assert contents[0] == contents[1]
    with pytest.raises(ValueError, match=r"figure\.pdf: figures are written as \.png or \.svg"):
        drawing.save(figures.curves(runs), tmp_path / "figure.pdf")


def test_a_dollar_sign_is_a_dollar_sign(make):
    draws(figures.curves(make({specification("sgd"): PLAIN}), title="$x_$ <b>"))
