"""When a run reaches a loss, and what that says about CProp; numbers worked out by hand."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest

from cprop_lab.compare import compare, verdict
from cprop_lab.results import Store, identify
from cprop_lab.specification import Specification
from cprop_lab.targets import Pair, outcome, pairs, reached, smoothed, spread, when

PLAIN = Specification("tasks:Blobs", "sgd", lr=0.1, iterations=400, evaluate_every=100)


@pytest.fixture
def make(tmp_path):
    store = Store(tmp_path)

    def write(specification, losses, status="finished", pace=0.01, **columns):
        rows = [
            {"step": 100 * i, "seconds": pace * 100 * i, "train_loss": loss, "test_loss": loss + 1, **columns}
            for i, loss in enumerate(losses)
        ]
        store.write(specification, status, rows, {})
        return store.read(identify(specification))

    return write


def pair(make, plain, scaled, pace=0.02, **columns):
    ours = [
        make(PLAIN.but(optimizer="cprop-sgd", seed=i), losses, pace=pace, **columns) for i, losses in enumerate(scaled)
    ]
    return Pair([make(PLAIN.but(seed=i), losses, **columns) for i, losses in enumerate(plain)], ours)


def test_curves_are_averaged_before_they_are_compared(make):
    run = make(PLAIN, [9, 6, 3, 3])
    assert smoothed(run).tolist() == [9, 7.5, 6, 4]
    assert reached(run, 5) == 250  # half-way between 6 and 4
    assert reached(run, 9) == 0
    assert reached(run, 3.9) is None


def test_seconds_are_those_of_undisturbed_steps(make):
    run = make(PLAIN, [9, 6, 3, 3])
    seconds = pa.array([0.0, 1.0, 2.0, 99.0])
    disturbed = replace(
        run, curves=run.curves.set_column(run.curves.schema.get_field_index("seconds"), "seconds", seconds)
    )
    assert when(disturbed, 4, "seconds") == when(run, 4, "seconds") == 3


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
    plain = [make(PLAIN, [9, 99], status="diverged"), make(PLAIN.but(seed=1), [3, 9, 9, 9])]
    plain.append(make(PLAIN.but(seed=2), [9, 9, 9, 6, 3]))
    ours = [make(PLAIN.but(optimizer="cprop-sgd", seed=i), [9, 6, 3, 3, 3]) for i in range(3)]
    assert Pair(plain, ours).shares("iterations") == [0.5]
    assert Pair(plain[:1], ours[:1]).shares("iterations") == []
    assert "nothing to compare with" in verdict("CProp(SGD)", Pair(plain[:1], ours[:1]))
    assert outcome(Pair(plain[:1], ours[:1]), "iterations") == "1 of 1 did not learn without CProp"
    assert outcome(Pair(plain, ours), "iterations") == "0.50, 2 of 3 did not learn without CProp"


def test_pairs_are_found_by_what_they_have_in_common(make):
    runs = [make(PLAIN.but(optimizer=o, seed=s), [2, 1]) for o in ("sgd", "cprop-sgd", "cprop-adam") for s in (1, 0)]
    runs += [make(PLAIN.but(optimizer="cprop-sgd", batch_size=8, seed=s), [2, 1]) for s in (0, 1)]
    runs += [make(PLAIN.but(optimizer="cprop-sgd", settings={"cprop_c": 3.0}, seed=s), [2, 1]) for s in (0, 1)]
    found = pairs(runs)
    assert list(found) == ["CProp(SGD)", "CProp(SGD), c = 3"]
    assert [run.specification.seed for run in found["CProp(SGD)"].plain] == [0, 1]


def test_cprop_is_paired_with_each_learning_rate_of_its_optimizer(make):
    runs = [make(PLAIN.but(lr=lr), [2, 1]) for lr in (0.1, 0.03)] + [make(PLAIN.but(optimizer="cprop-sgd"), [2, 1])]
    assert {name: pair.plain[0].specification.lr for name, pair in pairs(runs).items()} == {
        "CProp(SGD) against learning rate 0.1": 0.1,
        "CProp(SGD) against learning rate 0.03": 0.03,
    }


SLOW, FAST = [9, 9, 9, 6, 3], [9, 6, 3, 3, 3]
NEVER = [9, 9, 9, 9, 9]


def test_a_verdict_that_helps(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW, SLOW], [FAST, FAST, FAST]))
    assert said == (
        "CProp(SGD) helps: at learning rate 0.1 and over 3 seeds, to the training loss at which SGD ends it saves 50% "
        "of the iterations (95 % interval 50% to 50%), and saves 0% of the time (95 % interval 0% to 0%) on this "
        "machine. At the end, test loss is 4 with CProp and 7 without; where CProp comes to the training loss of the "
        "one without, it is 7."
    )


def test_a_verdict_that_the_clock_spoils(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW, SLOW], [FAST, FAST, FAST], pace=0.03, accuracy=0.9))
    assert said.startswith("CProp(SGD) helps in iterations and not in time: ")
    assert "saves 50% of the iterations" in said
    assert "takes 50% more time (95 % interval 50% to 50%)" in said
    assert said.count("90 %") == 3  # what is measured as a part is said in percent


def test_a_verdict_that_does_not(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW], [NEVER, NEVER]))
    assert said.startswith(
        "CProp(SGD) does not help: at learning rate 0.1, 2 of 2 seeds never came to the training loss at which SGD end"
    )
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW], [FAST, NEVER]))
    assert said.startswith("CProp(SGD) cannot be relied on: at learning rate 0.1, 1 of 2 seeds never came to")
    assert said.endswith("without.")  # and nothing of where both are equally far: one seed never is
    slower = [[9, 9, 9, 9, 9, 6, 3]] * 2
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW], slower))
    assert "does not help: at learning rate 0.1 and over 2 seeds, to" in said
    assert "it takes 50% more iterations" in said


def test_a_verdict_that_chance_allows_no_more_of(make):
    said = verdict("CProp(SGD)", pair(make, [SLOW, SLOW], [FAST, [9, 9, 9, 6, 3]]))
    # Shares 0.5 and 1: the mean is 0.75, and with two seeds the interval is 12.7 standard errors wide.
    assert "makes no clear difference" in said
    assert "(95 % interval -293% to 343%)" in said
    said = verdict("CProp(SGD)", pair(make, [SLOW], [FAST]))
    assert "may help" in said
    assert "With one seed there is no telling" in said


def test_a_run_that_got_there_and_diverged_did_not_get_there(make):
    plain = [make(PLAIN.but(seed=i), SLOW) for i in range(2)]
    blown = [make(PLAIN.but(optimizer="cprop-sgd", seed=i), [*FAST, math.nan], status="diverged") for i in range(2)]
    assert Pair(plain, blown).shares("iterations") == [math.inf, math.inf]
    said = verdict("CProp(SGD)", Pair(plain, blown))
    assert said.startswith("CProp(SGD) does not help")
    assert said.endswith("test loss is lost (diverged) with CProp and 7 without.")
    one = Pair(plain, [blown[0], make(PLAIN.but(optimizer="cprop-sgd", seed=1), FAST)])
    assert "1 of 2 seeds never came to" in verdict("CProp(SGD)", one)


def test_a_spread():
    assert spread([1, 2, 3]).margin == pytest.approx(4.303 / math.sqrt(3))
    assert spread([2]).margin == math.inf
    assert spread(list(range(100))).margin == pytest.approx(1.96 * 29.011 / 10, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("cprop-adam", "cprop-adam has CProp already: name the optimizer alone"),
        ("schedule-free-adamw", "CProp cannot be put around schedule-free-adamw"),
        ("adan", "no optimizer is called 'adan'"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_anything_runs(base, message):
    with pytest.raises(ValueError, match=message):
        compare(PLAIN, ["sgd", base], run=lambda _: pytest.fail("ran"))


def test_a_comparison_selects_and_runs_both(make):
    asked = []

    def run(specifications):
        asked.append(specifications)
        return [
            make(s, [2, 1 + abs(math.log(s.lr / 0.3)) + 0.1 * (not s.optimizer.startswith("cprop"))])
            for s in specifications
        ]

    found = compare(PLAIN, ["sgd"], run, seeds=2, selection_iterations=50)
    assert found.selections["sgd"].lr == pytest.approx(0.3)
    assert {s.iterations for s in asked[0]} == {50}
    assert [(s.optimizer, s.lr, s.seed, s.iterations) for s in asked[-1]] == [
        (name, 0.3, seed, 400) for name in ("sgd", "cprop-sgd") for seed in (0, 1)
    ]
    assert list(found.pairs) == ["CProp(SGD)"]
