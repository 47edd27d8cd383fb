"""Rows are tuned alike on seeds that are not judged, and a claim holds only if the intervals carry it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import studies.experiments  # noqa: F401  # adds them
import torch
from studies.denoising import FashionDenoiser
from studies.judging import contender, judge
from studies.registered import TUNING, doubled

from cprop_lab.analysis.intervals import difference
from cprop_lab.experiments import EXPERIMENTS, PRESETS

EXPERIMENT = EXPERIMENTS["denoising-4000"]
BEST = {"cprop-adamw+average": 4e-3}


def loss(specification):
    """Lowest at a row's own rate and at beta1 = 0.95, and a little lower for rows with CProp; seeds differ."""
    best = BEST.get(specification.optimizer, 1e-3)
    seed = np.random.default_rng([specification.seed, len(specification.optimizer)]).normal() * 1e-3
    usual = specification.settings.get("beta1") != 0.95
    return math.log(specification.lr / best) ** 2 + 0.1 * usual + seed - 0.05 * specification.optimizer_name.cprop


class Lab:
    """Stands in for the engine: what a run ends with is known."""

    def __init__(self):
        self.runs = {}

    def run(self, specifications):
        for one in specifications:
            columns = {"test_loss": np.array([1.0, loss(one)])}
            run = SimpleNamespace(run_id=one.to_json(), specification=one, status="finished", column=columns.get)
            self.runs[run.run_id] = run
        return [self.runs[one.to_json()] for one in specifications]


@pytest.fixture(scope="module")
def finished():
    lab = Lab()
    return EXPERIMENT.run(PRESETS["reduced"], lab.run), lab.runs


def test_every_row_gets_the_rate_and_the_momentum_with_the_lowest_held_out_loss(finished):
    manifest, _ = finished
    for about in manifest["tuned"].values():
        assert about["settings"]["beta1"] == 0.95
        assert about["lr"] == pytest.approx(BEST.get(about["optimizer"], 1e-3), rel=0.45)


def test_no_seed_that_tuned_is_judged_and_all_runs_are_of_full_length(finished):
    manifest, runs = finished
    for part, seeds in (("judged", set(range(10))), ("tuning", set(TUNING))):
        for ids in manifest[part].values():
            assert {runs[name].specification.seed for name in ids} == seeds
    assert {run.specification.iterations for run in runs.values()} == {4_000}


def test_the_plan_has_what_is_run(finished):
    _, runs = finished
    plan = EXPERIMENT.plan(PRESETS["reduced"])
    assert len(plan.least) <= len(runs) <= len(plan.most)


def test_the_contender_is_ahead_of_rows_that_end_higher(finished):
    manifest, runs = finished
    verdicts = judge(manifest, runs)
    assert {verdict.contender for verdict in verdicts} == {contender(manifest)}
    assert len(verdicts) == 5
    assert all(verdict.ahead for verdict in verdicts)


def test_the_same_optimizer_under_two_names_comes_out_unordered():
    """With seeds of its own each: in one of twenty cases an interval of 95 % misses, and with ten seeds some more."""
    generator = np.random.default_rng(1)
    found = [difference(*generator.normal(size=(2, 10))) for _ in range(400)]
    assert np.mean([one.below_zero or one.above_zero for one in found]) < 0.09


def test_a_difference_beyond_the_seeds_is_found():
    generator = np.random.default_rng(1)
    ours, theirs = generator.normal(size=(2, 10))
    assert difference(ours - 4, theirs).below_zero
    assert difference(ours + 4, theirs).above_zero


@pytest.mark.parametrize(
    ("ours", "theirs", "low"), [([1.0, math.inf], [2.0, 2.0], math.inf), ([1, 1], [2, math.inf], -math.inf)]
)
def test_a_row_that_diverged_is_behind(ours, theirs, low):
    assert difference(ours, theirs).low == low


def test_values_that_are_not_paired_are_refused():
    with pytest.raises(ValueError, match="there are 2 values and 3: a comparison needs the same seeds"):
        difference([1, 2], [1, 2, 3])


def test_rates_are_a_factor_of_two_apart():
    assert [doubled(1e-3, k) for k in range(-1, 2)] == [5e-4, 1e-3, 2e-3]


def test_the_denoiser_draws_new_noise_in_training_and_none_in_evaluation():
    task = FashionDenoiser()
    batch = (torch.zeros(4, 196), torch.full((4,), 0.5), torch.zeros(4, 196))
    assert all(map(torch.equal, task.prepare(batch, training=False), batch))
    _, levels, noises = task.prepare(batch, training=True)
    assert not torch.equal(levels, batch[1])
    assert noises.std() > 0.5


def test_what_the_denoiser_learns_is_the_noise():
    """At level one the image is all noise, and a network that passes it on has no loss."""
    task = FashionDenoiser()
    images, noises = torch.randn(2, 8, 196)
    assert task.loss(lambda noisy, level: noisy, (images, torch.ones(8), noises)) < 1e-6
    assert task.loss(lambda noisy, level: noisy, (images, torch.zeros(8), noises)) > 1
