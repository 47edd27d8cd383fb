"""When a run reaches a loss, and what that says about CProp; numbers worked out by hand."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from test_selection import Phases

from cprop_lab.analysis.curves import reached, smoothed, when
from cprop_lab.analysis.pairs import Pair, outcome, pairs, pairs_of
from cprop_lab.analysis.spread import spread
from cprop_lab.analysis.verdict import verdict
from cprop_lab.experiments.comparison import compare
from cprop_lab.output import figures
from cprop_lab.output.tables import times_to_target
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

PLAIN = Specification("tasks:Blobs", "sgd", lr=0.1, iterations=400, evaluate_every=100)


@pytest.fixture
def make(tmp_path):
    store = Store(tmp_path)

    def write(specification, losses, status="finished", pace=0.01, made=None, **columns):
        rows = [
            {"step": 100 * i, "seconds": pace * 100 * i, "train_loss": loss, "test_loss": loss + 1, **columns}
            for i, loss in enumerate(losses)
        ]
        store.write(specification, status, rows, made or {})
        return store.read(run_id(specification))

    return write


def pair(make, plain, scaled, pace=0.02, **columns):
    ours = [
        make(PLAIN.replace(optimizer="cprop-sgd", seed=i), losses, pace=pace, **columns)
        for i, losses in enumerate(scaled)
    ]
    return Pair([make(PLAIN.replace(seed=i), losses, **columns) for i, losses in enumerate(plain)], ours)


def test_curves_are_averaged_before_they_are_compared(make):
    run = make(PLAIN, [9, 6, 3, 3])
    assert smoothed(run).tolist() == [9, 7.5, 6, 4]
    assert reached(run, 5) == 250  # half-way between 6 and 4
    assert reached(run, 9) == 0
    assert reached(run, 3.9) is None


def test_seconds_are_those_of_undisturbed_steps(make):
    run = make(PLAIN, [9, 6, 3, 3])
    disturbed = replace(run, columns={**run.columns, "seconds": np.array([0.0, 1.0, 2.0, 99.0])})
    assert when(disturbed, 4, "seconds") == when(run, 4, "seconds") == 3


IDLE = {"host": "one", "cpu": "fast", "threads": 1, "torch": "2.13.0", "cpu_share": 0.99}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"host": "two"}, r"the hosts differ \(one and two\)"),
        ({"torch": "2.6.0"}, r"the builds of torch differ \(2\.13\.0 and 2\.6\.0\)"),
        ({"cpu": "slow"}, r"the processors differ \(fast and slow\)"),
        ({"cpu_share": 0.5}, "one had more of the CPU than the other"),
    ],
)
def test_seconds_of_unlike_machines_are_not_judged(make, changes, why):
    plain = [make(PLAIN.replace(seed=seed), [9, 9, 9, 6, 3], made=IDLE) for seed in range(3)]
    ours = [
        make(PLAIN.replace(optimizer="cprop-sgd", seed=seed), [9, 6, 3, 3, 3], pace=0.05, made={**IDLE, **changes})
        for seed in range(3)
    ]
    said = verdict("CProp(SGD)", Pair(plain, ours))
    withheld = [
        note for note in said.notes if re.match(rf"No verdict on time: .*CProp, {why}\. Time them on one", note)
    ]
    assert len(withheld) == bool(why)
    assert ("time" in said.headline) != bool(why)
    (row,) = (row for row in said.rows if row[0] == "seconds to that loss")
    assert bool(row[-1]) != bool(why)
    (cells,) = times_to_target({"CProp(SGD)": Pair(plain, ours)}).rows
    assert (cells[7] == "-") == bool(why)
    axes = figures.times_to_target({"CProp(SGD)": Pair(plain, ours)}).axes[0]
    assert len(axes.patches) == (1 if why else 2)
    assert (axes.texts[1].get_text() == "no verdict on time") == bool(why)


def test_what_is_saved(make):
    one = pair(make, [[9, 9, 9, 6, 3]], [[9, 6, 3, 3, 3]])
    # The plain run ends at (9 + 6 + 3) / 3 = 6, after 400 iterations; with CProp 6 is reached at 200.
    assert one.targets == [6]
    assert one.times("iterations") == [(400, 200)]
    assert one.shares("iterations") == [0.5]
    assert one.shares("seconds") == [1.0]  # half the iterations, each twice as long


def test_what_it_has_come_to_where_both_are_equally_far(make):
    one = pair(make, [[9, 9, 9, 6, 3], [9, 9, 9, 6, 3]], [[12, 7, 3, 3, 3], [9, 9, 9, 9, 9]])
    # The training loss of 6 is passed between 22 / 3 and 13 / 3; in these tests a test loss is one more.
    iteration = 200 + 100 * (22 / 3 - 6) / 3
    assert one.times("iterations")[0] == (400, pytest.approx(iteration))
    assert one.there("test_loss") == [(7, pytest.approx(7))]  # the second seed never gets there
    assert one.there("seconds") == [(3, pytest.approx(0.02 * (iteration - 100)))]  # averaged with the two rows before


def test_seeds_that_did_not_learn_are_left_out(make):
    plain = [make(PLAIN, [9, 99], status="diverged"), make(PLAIN.replace(seed=1), [3, 9, 9, 9])]
    plain.append(make(PLAIN.replace(seed=2), [9, 9, 9, 6, 3]))
    ours = [make(PLAIN.replace(optimizer="cprop-sgd", seed=i), [9, 6, 3, 3, 3]) for i in range(3)]
    assert Pair(plain, ours).shares("iterations") == [0.5]
    assert Pair(plain[:1], ours[:1]).shares("iterations") == []
    said = verdict("CProp(SGD)", Pair(plain[:1], ours[:1]))
    assert said.headline == "SGD + CProp: nothing to compare with, because SGD did not learn at learning rate 0.1."
    assert [row[0] for row in said.rows] == ["final training loss", "final test loss"]
    assert "Two seeds left out: the run without CProp did not learn." in verdict("CProp(SGD)", Pair(plain, ours)).notes
    assert outcome(Pair(plain[:1], ours[:1]), "iterations") == "1 of 1 did not learn without CProp"
    assert outcome(Pair(plain, ours), "iterations") == "0.50, 2 of 3 did not learn without CProp"


def test_pairs_are_found_by_what_they_have_in_common(make):
    runs = [
        make(PLAIN.replace(optimizer=o, seed=s), [2, 1]) for o in ("sgd", "cprop-sgd", "cprop-adam") for s in (1, 0)
    ]
    runs += [make(PLAIN.replace(optimizer="cprop-sgd", batch_size=8, seed=s), [2, 1]) for s in (0, 1)]
    runs += [make(PLAIN.replace(optimizer="cprop-sgd", settings={"cprop_c": 3.0}, seed=s), [2, 1]) for s in (0, 1)]
    found = pairs(runs)
    assert list(found) == ["CProp(SGD)", "CProp(SGD), c = 3"]
    assert [run.specification.seed for run in found["CProp(SGD)"].plain] == [0, 1]


def test_pairs_have_the_seeds_that_both_ran(make):
    seeds = {"sgd": (0, 1, 2), "cprop-sgd": (2, 0), "adam": (0,), "cprop-adam": (1,)}
    runs = [make(PLAIN.replace(optimizer=o, seed=seed), [2, 1]) for o, own in seeds.items() for seed in own]
    (one,) = pairs(runs).values()
    assert [[run.specification.seed for run in side] for side in (one.plain, one.scaled)] == [[0, 2], [0, 2]]


def test_a_search_for_learning_rates_has_no_pairs(make):
    runs = [make(PLAIN.replace(optimizer=optimizer), [2, 1]) for optimizer in ("sgd", "cprop-sgd")]
    assert list(pairs_of({"kind": "curves"}, runs)) == ["CProp(SGD)"]
    assert pairs_of({"kind": "learning-rates"}, runs) == {}


def test_cprop_is_paired_with_each_learning_rate_of_its_optimizer(make):
    runs = [make(PLAIN.replace(lr=lr), [2, 1]) for lr in (0.1, 0.03)] + [
        make(PLAIN.replace(optimizer="cprop-sgd"), [2, 1])
    ]
    assert {name: pair.plain[0].specification.lr for name, pair in pairs(runs).items()} == {
        "CProp(SGD) against learning rate 0.1": 0.1,
        "CProp(SGD) against learning rate 0.03": 0.03,
    }


SLOW, FAST = [9, 9, 9, 6, 3], [9, 6, 3, 3, 3]
NEVER = [9, 9, 9, 9, 9]


def headline(pair):
    return verdict("CProp(SGD)", pair).headline


def test_a_verdict_that_helps(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW, SLOW], [FAST, FAST, FAST], pace=0.01))
    assert said.headline == (
        "SGD + CProp helps: it reaches SGD's final training loss in 50 % fewer iterations (95 % interval 50 to 50 %, "
        "three seeds) and 50 % less time (50 to 50 %)."
    )
    assert said.headings == ["", "SGD", "CProp(SGD)", "change"]
    assert said.rows == [
        ["iterations to that loss", "400", "200", "50 % fewer (50 to 50 %)"],
        ["seconds to that loss", "4.00", "2.00", "50 % less (50 to 50 %)"],
        ["final training loss", "6.00", "3.00", ""],
        ["final test loss", "7.00", "4.00", ""],
        ["test loss at that loss", "7.00", "7.00", ""],
    ]


def test_a_verdict_that_the_clock_spoils(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW, SLOW], [FAST, FAST, FAST], pace=0.03, accuracy=0.9))
    assert said.headline == (
        "SGD + CProp helps in iterations, costs time: it reaches SGD's final training loss in 50 % fewer iterations "
        "(95 % interval 50 to 50 %, three seeds) but 50 % more time (50 to 50 %)."
    )
    assert said.rows[-2:] == [
        ["final test accuracy", "90.0 %", "90.0 %", ""],
        ["test accuracy at that loss", "90.0 %", "90.0 %", ""],
    ]
    said = headline(pair(make, [SLOW, SLOW, SLOW], [FAST, FAST, FAST], pace=0.02))
    assert said.startswith("SGD + CProp helps in iterations: ")
    assert said.endswith("with no clear difference in time.")


def test_a_verdict_that_does_not(make):
    missed = pair(make, [SLOW, SLOW], [NEVER, NEVER])
    assert headline(missed) == (
        "SGD + CProp does not help: it never reaches SGD's final training loss (two seeds). "
        "Seeds 0 and 1 end 50 % above it: final loss 9.00, target 6.00."
    )
    assert verdict("CProp(SGD)", missed).rows[0][2:] == ["not reached", ""]
    some = pair(make, [SLOW, SLOW], [FAST, NEVER])
    assert headline(some) == (
        "SGD + CProp has mixed results: one of two seeds reaches SGD's final training loss. "
        "Seed 1 ends 50 % above it: final loss 9.00, target 6.00."
    )
    assert verdict("CProp(SGD)", some).rows[0][2:] == ["200 (reached by 1 of 2)", ""]
    assert "at that loss" not in verdict("CProp(SGD)", some).rows[-1][0]  # one seed never gets there
    slower = [[9, 9, 9, 9, 9, 6, 3]] * 2
    assert headline(pair(make, [SLOW, SLOW], slower)) == (
        "SGD + CProp does not help: it reaches SGD's final training loss in 50 % more iterations (95 % interval 50 to "
        "50 %, two seeds) and 3 times as much time (3 to 3 times)."
    )


ALMOST = [9, 9, 9, 6.1, 3]


def test_a_near_tie_is_no_clear_difference(make):
    """The mean of the last three is 0.1 / 3 above the target of 6, which is less than a percent."""
    said = headline(pair(make, [SLOW] * 3, [FAST, ALMOST, FAST]))
    assert said == (
        "SGD + CProp makes no clear difference: two of three seeds reach SGD's final training loss. "
        "Seed 1 ends 0.56 % above it: final loss 6.033, target 6.000."
    )
    assert headline(pair(make, [SLOW] * 2, [ALMOST] * 2)).startswith(
        "SGD + CProp makes no clear difference: it never reaches SGD's final training loss (two seeds). Seeds 0 and 1 "
    )
    mixed = headline(pair(make, [SLOW] * 9, [FAST, *[ALMOST] * 7, NEVER]))
    assert mixed.startswith("SGD + CProp has mixed results: one of nine seeds reaches")
    assert "Seeds 1, 2, 3, 4, 5 and 3 more end 0.56 % to 50 % above it" in mixed


def test_a_verdict_that_chance_allows_no_more_of(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW], [FAST, SLOW]))
    # Ratios 0.5 and 1: their logarithms' mean is log(0.5) / 2, and with two seeds the margin is 12.7 standard errors,
    # which are log(2) / 2. A linear interval would be -293 % to 343 % saved.
    low, high = (math.exp((sign * 12.706 - 1) * math.log(2) / 2) for sign in (-1, 1))
    assert said.headline == (
        "SGD + CProp makes no clear difference: it reaches SGD's final training loss in 29 % fewer iterations "
        f"(95 % interval {100 * (1 - low):.1f} % fewer to {high:.3g} times as many, two seeds)."
    )
    assert said.notes[0] == "Two seeds can hardly tell a difference from chance; use at least three (--seeds 3)."
    quicker = headline(pair(make, [SLOW, SLOW], [FAST, SLOW], pace=1e-4))
    assert quicker.startswith("SGD + CProp makes no clear difference in iterations: it reaches")
    assert "and 99" in quicker
    said = verdict("CProp(SGD)", pair(make, [SLOW], [FAST], pace=0.005))
    assert said.headline == (
        "SGD + CProp may help: it reaches SGD's final training loss in 50 % fewer iterations (one seed) and 75 % less "
        "time."
    )
    assert said.notes[0] == "One seed cannot tell a difference from chance; use at least three (--seeds 3)."


def test_nothing_is_saved_more_than_wholly(make):
    """However few and far apart the seeds are: intervals on a log scale, at most three digits."""
    hardly = pair(make, [SLOW, SLOW], [FAST, [9, 0, 0, 0, 0]], pace=1e-7)
    said = verdict("CProp(SGD)", hardly)
    percents = [float(number) for row in said.rows[:2] for number in re.findall(r"([\d.]+) %", row[3])]
    assert percents
    assert all(percent < 100 for percent in percents)
    assert not re.search(r"-\d", said.headline)


def test_runs_that_are_alike_make_no_difference(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW] * 3, [SLOW] * 3, pace=0.01))
    assert said.headline == (
        "SGD + CProp makes no clear difference: it reaches SGD's final training loss in as many iterations "
        "(three seeds)."
    )
    assert said.rows[0] == ["iterations to that loss", "400", "400", "as many"]


def test_runs_shorter_than_the_horizon_are_noted(make):
    note = (
        "Runs of 400 iterations are shorter than CProp's horizon of 1/(1 - beta) = 1,000 steps, so its averages have "
        "not settled; train for longer."
    )
    short = pair(make, [SLOW] * 3, [FAST] * 3)
    assert verdict("CProp(SGD)", short).notes == [note]
    quicker = PLAIN.replace(optimizer="cprop-sgd", settings={"cprop_beta": 0.99})
    enough = Pair(short.plain, [make(quicker.replace(seed=i), FAST) for i in range(3)])
    assert verdict("CProp(SGD), beta = 0.99", enough).notes == []


def test_a_run_that_got_there_and_diverged_did_not_get_there(make):
    plain = [make(PLAIN.replace(seed=i), SLOW) for i in range(2)]
    blown = [make(PLAIN.replace(optimizer="cprop-sgd", seed=i), [*FAST, math.nan], status="diverged") for i in range(2)]
    assert Pair(plain, blown).shares("iterations") == [math.inf, math.inf]
    said = verdict("CProp(SGD)", Pair(plain, blown))
    assert said.headline == (
        "SGD + CProp does not help: it never reaches SGD's final training loss (two seeds). Seeds 0 and 1 diverged."
    )
    assert said.rows[-1] == ["final test loss", "7.00", "diverged", ""]
    one = Pair(plain, [blown[0], make(PLAIN.replace(optimizer="cprop-sgd", seed=1), FAST)])
    assert headline(one).endswith(
        "has mixed results: one of two seeds reaches SGD's final training loss. Seed 0 diverged."
    )


@pytest.mark.parametrize("seeds", [2, 3, 11, 12, 13, 30, 100])
def test_a_spreads_margin_is_students(seeds):
    values = list(np.random.default_rng(seeds).normal(size=seeds))
    low, high = stats.t.interval(0.95, seeds - 1, np.mean(values), stats.sem(values))
    assert spread(values).margin == pytest.approx((high - low) / 2, rel=1e-6)
    assert spread(values).mean == pytest.approx((low + high) / 2)


def test_one_value_has_no_margin():
    assert spread([2]).margin == math.inf


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("cprop-adam", "cprop-adam already includes CProp: name the plain optimizer"),
        ("adan", "unknown optimizer 'adan'"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_anything_runs(base, message):
    with pytest.raises(ValueError, match=message):
        compare(PLAIN, ["sgd", base], run=lambda _: pytest.fail("ran"))


def test_a_peer_that_cprop_cannot_wrap_is_compared_without_it(make):
    found = compare(
        PLAIN,
        ["sgd", "schedule-free-adamw"],
        lambda asked: [make(s, [9, abs(math.log(s.lr / 0.01))]) for s in asked],
        seeds=1,
    )
    assert [run.specification.optimizer for run in found.runs] == ["sgd", "cprop-sgd", "schedule-free-adamw"]
    assert list(found.pairs) == ["CProp(SGD)"]


def test_a_comparison_selects_and_runs_both(make):
    asked = []

    def run(specifications):
        asked.append(specifications)
        return [
            make(s, [2, 1 + abs(math.log(s.lr / 0.3)) + 0.1 * (not s.optimizer.startswith("cprop"))])
            for s in specifications
        ]

    told = Phases()
    found = compare(PLAIN, ["sgd"], run, seeds=2, selection_iterations=50, progress=told)
    # Of about three rounds, the first has two more rates to come with two seeds; then two optimizers with two seeds.
    assert told[0] == ("selecting learning rates, round 1 of about 3", 2 * 2 * 50 + 2 * 2 * 400)
    assert told[-1] == ("comparing without and with CProp", 0)
    assert found.selections["sgd"].lr == pytest.approx(0.3)
    assert {s.iterations for s in asked[0]} == {50}
    assert [(s.optimizer, s.lr, s.seed, s.iterations) for s in asked[-1]] == [
        (name, 0.3, seed, 400) for name in ("sgd", "cprop-sgd") for seed in (0, 1)
    ]
    assert list(found.pairs) == ["CProp(SGD)"]
