"""The experiments of the search run beside the scoreboard's, under its rules."""

import research  # noqa: F401  # adds its experiments

from cprop_lab.experiments import EXPERIMENTS, PRESETS, scoreboard


def test_finalists_run_beside_the_scoreboards_rows_and_are_tuned_like_them():
    for name, experiment in EXPERIMENTS.items():
        if name.startswith("finalists-"):
            board = EXPERIMENTS[name.replace("finalists", "scoreboard")]
            finalists = [variant for variant in experiment.variants if variant not in board.variants]
            assert {variant.optimizer for variant in experiment.variants} >= set(scoreboard.TARGETS)
            assert 0 < len(finalists) < len(experiment.variants)
            assert all(variant.own_rate for variant in finalists)


def test_candidates_have_seeds_that_no_scoreboard_uses():
    seeds = {
        name: {s.seed for s in experiment.specifications(PRESETS["reduced"], {})}
        for name, experiment in EXPERIMENTS.items()
    }
    assert seeds["candidates-fmnist-fc"] == {100, 101, 102}
    assert all(max(own) < 10 for name, own in seeds.items() if not name.startswith("candidate"))


def test_given_learning_rates_are_not_selected():
    asked = []

    def run(specifications):
        asked.extend(specifications)
        return []

    about = EXPERIMENTS["finalist-rates-ptb-lstm-small"].run(PRESETS["reduced"], run, select=True)
    assert {s.lr for s in asked} == {0.009, 0.015, 0.03}
    assert {s.iterations for s in asked} == {PRESETS["reduced"].lengths["ptb-lstm-small"].iterations}
    assert about["learning_rates"] == {}
