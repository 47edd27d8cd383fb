"""The factor-of-three selection finds the best of a landscape that is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cprop_lab.analysis.curves import final_loss
from cprop_lab.experiments.selection import candidates, choose, grid, select
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store


def search(guess, loss):
    """All places that a search tries, and where it ends."""
    losses = {}
    while following := candidates(guess, losses):
        assert not set(following) & set(losses)
        losses |= {place: loss(grid(guess, place)) for place in following}
    return losses, choose(losses)


@given(best=st.integers(-8, 8), width=st.floats(0.1, 3), tilt=st.floats(-0.4, 0.4))
def test_it_finds_the_best_of_a_valley(best, width, tilt):
    """However far the guess is off, with a minimum anywhere within the nearest half factor."""

    def loss(lr):
        distance = math.log(lr / grid(0.1, best)) / math.log(10**0.5) + tilt
        return 1 - math.exp(-abs(distance) * width) if distance < 2 else math.inf

    losses, chosen = search(0.1, loss)
    assert chosen == best
    assert {best - 1, best + 1} <= set(losses)  # the best is inside the range, as the paper asks


def test_it_tries_no_more_than_it_must():
    losses, chosen = search(0.1, lambda lr: abs(math.log(lr / 0.003)))
    assert grid(0.1, chosen) == 0.003
    assert sorted(losses) == [-4, -3, -2, -1, 0, 1]


def test_where_everything_diverges_it_goes_down():
    losses, chosen = search(10.0, lambda lr: math.inf if lr > 0.5 else abs(math.log(lr / 0.1)))
    assert grid(10.0, chosen) == 0.1
    assert 0.3 in [grid(10.0, place) for place in losses]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda lr: lr, r"no best learning rate from 1e-07 to 0\.3: the loss is lowest at the lower end of the range"),
        (
            lambda lr: -lr,
            r"no best learning rate from 0\.03 to 100000: the loss is lowest at the upper end of the range",
        ),
        (lambda lr: math.inf, r"^every learning rate from 1e-07 to 0\.3 gave NaN.*: look at the task's loss$"),
    ],
)
def test_a_landscape_without_a_best_is_an_error_and_not_an_endless_search(loss, message):
    with pytest.raises(ValueError, match=message):
        search(0.1, loss)


def test_of_equals_the_smaller_is_taken():
    assert choose({-1: 0.5, 0: 0.5, 1: 0.7}) == -1


def test_the_grid_is_the_papers():
    assert [grid(1e-3, k) for k in range(-3, 4)] == [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]


class Phases(list):
    """Writes down which phases it is told of."""

    def phase(self, title, later=0):
        self.append((title, later))


def test_several_optimizers_search_in_one_set_of_runs_a_stage(tmp_path):
    """And a rate's loss is the mean over its seeds, infinite if one of them diverged."""
    store = Store(tmp_path)
    best = {"sgd": 0.3, "adam": 1e-4}
    stages = []

    def run(specifications):
        stages.append([(s.optimizer, s.lr, s.seed) for s in specifications])
        for s in specifications:
            loss = abs(math.log(s.lr / best[s.optimizer])) + 0.01 * s.seed
            diverged = s.lr > 3 and s.seed == 1
            rows = [{"step": i, "seconds": 0.0, "train_loss": loss, "test_loss": loss} for i in range(4)]
            store.write(s, "diverged" if diverged else "finished", rows, {})
        return [store.read(run_id(s)) for s in specifications]

    base = Specification("tasks:Blobs", "sgd", lr=1.0)
    told = Phases()
    found = select({n: base.replace(optimizer=n) for n in best}, run, {"sgd": 1.0, "adam": 1e-3}, (0, 1), told, later=7)
    assert {name: selection.lr for name, selection in found.items()} == best
    assert found["sgd"].losses[0.3] == pytest.approx(0.005)
    assert found["sgd"].losses[1.0] == pytest.approx(math.log(1 / 0.3) + 0.005)
    assert len(stages[0]) == 2 * 3 * 2
    assert len(stages) == 3
    assert [title for title, _ in told] == [f"selecting learning rates, round {n} of about 3" for n in (1, 2, 3)]
    # Both still search after the first round, and one rate each is tried with two seeds.
    assert [later for _, later in told] == [7 + 2 * 2 * 2 * base.iterations, 7 + 2 * 2 * base.iterations, 7]
    assert len(found["adam"].runs) == 5 * 2


def test_final_loss_is_a_mean_of_the_last_rows(tmp_path):
    store = Store(tmp_path)
    run = Specification("tasks:Blobs", "sgd", lr=1.0)
    rows = [{"step": i, "seconds": 0.0, "train_loss": loss, "test_loss": 0.0} for i, loss in enumerate([9, 3, 2, 1])]
    store.write(run, "finished", rows, {})
    assert final_loss(store.runs()[0]) == 2
