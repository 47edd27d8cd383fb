"""The experiments of the search: candidates, finalists beside the scoreboard's rows, and both at given rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cprop_lab import Experiment, Variant
from cprop_lab.experiments import scoreboard
from cprop_lab.experiments.catalogue import WORKLOADS, at_the_papers_eps
from cprop_lab.experiments.scoreboard import Scoreboard
from cprop_lab.run.recipes import Setting

__all__ = ["EXPERIMENTS"]

# Candidates for the next rule, on a seed that no scoreboard uses: around AdamW where noise rules, around Muon on a
# transformer. Measures over a tensor need whole tensors, so nothing is fused there.
NINTH: Final[Mapping[str, Setting]] = {"window": 1 / 9}
ALL: Final[Mapping[str, Setting]] = {"window": 1.0, "mu_y": 0.9}
RELATIVE: Final = ("relative_2", "relative_3", "relative_5", "relative_3_slowing_half")
CANDIDATES: Final[Mapping[str, Sequence[tuple[str, Mapping[str, Setting]]]]] = {
    "fmnist-fc": (
        *((peer, {}) for peer in ("adamw+average", "schedule-free-adamw", "gpa-adamw", "cprop-adamw+average")),
        # Telling parameters apart without slowing them down, and both at once.
        *(("cprop-adamw+average", {"cprop_measure": measure, "fused": False}) for measure in RELATIVE),
        # Averaging inside.
        *(("gpa-cprop", {"c": c}) for c in (1.0, 2.0, 4.0)),
        ("gpa-cprop", {"measure": "relative_3"}),
        # The right count, and other shapes.
        *(("cprop-adamw+average", {"cprop_measure": shape}) for shape in ("exact_count", "wiener", "positive_part")),
        # Around SGD, where the shape "wiener" minimises the expected error of a step.
        *((name, {}) for name in ("sgd+average", "cprop-sgd+average")),
        ("cprop-sgd+average", {"cprop_measure": "wiener"}),
        ("cprop-sgd+average", {"cprop_measure": "relative_3", "fused": False}),
    ),
    "ptb-gpt": (
        *((peer, {}) for peer in ("muon+average", "cprop-muon+average")),
        *(("cprop-muon+average", {"cprop_measure": measure, "cprop_fused": False}) for measure in RELATIVE),
        # Averaging inside, over a ninth of the run so far or, as Schedule-Free does, all of it.
        *(("gpa-muon", settings) for settings in ({}, NINTH, ALL)),
        *(
            ("gpa-cprop-muon", {**settings, **scale})
            for settings in (NINTH, ALL)
            for scale in ({}, {"c": 4.0}, {"measure": "relative_3"}, {"measure": "layer_mean"})
        ),
        # Conformity inside Muon, before it orthogonalises, and of its singular directions in place of elements.
        ("muon-vs+average", {}),
        *(("muon-snr+average", {"noise": noise}) for noise in (1.0, 2.0, 4.0)),
        # Less slowing, one scale per layer so that an orthogonal step stays orthogonal, a horizon that fits the run.
        ("cprop-muon+average", {"cprop_c": 2.0}),
        ("cprop-muon+average", {"cprop_measure": "layer_mean", "cprop_fused": False}),
        *(("cprop-muon+average", {"cprop_beta": beta}) for beta in (0.99, 0.997)),
    ),
}

EXPERIMENTS_OF_CANDIDATES: Final = tuple(
    Experiment(
        f"candidates-{workload}",
        f"Candidates for the next rule: {workload}",
        "beyond the paper",
        "No claim of the paper: what else could be done with conformity?",
        [Variant(workload, optimizer, size, settings, own_rate=True) for optimizer, settings in CANDIDATES[workload]],
        kind="learning-rates",
        panels=("train_loss",),
        first_seed=100,
    )
    for workload, _, size in WORKLOADS
    if workload in CANDIDATES
)

# Written down before they were run on the scoreboard's seeds, and run once, under its rules, beside the best peers.
# All have Adam's usual beta2 for what Muon does not orthogonalise. In development, the 0.95 of Muon's authors ended far
# higher on words, where most parameters are embeddings of rare words.
PEERS: Final = ("adamw", "adamw+cosine", "schedule-free-adamw", "muon+average", "muon+cosine")
LONG: Final[Mapping[str, Setting]] = {"beta2": 0.999}
FINALISTS: Final[Sequence[tuple[str, Mapping[str, Setting]]]] = (
    # An orthogonal step stays orthogonal with one scale per layer.
    ("cprop-muon+average", {**LONG, "cprop_measure": "layer_mean", "cprop_fused": False}),
    # Controls: no scale, a decay that does not ask the gradients, and averaged weights with a rate of their own.
    ("muon+average", LONG),
    ("muon+rsqrt+average", LONG),
    ("adamw+average", {}),
)

# Rates a factor of three apart, tuned on runs a quarter as long, leave a doubt where rows are close.
RATES: Final[Mapping[str, tuple[float, Sequence[float]]]] = {
    "fmnist-cnn": (0.0, (0.003, 0.009, 0.015)),
    "ptb-lstm-small": (0.1, (0.009, 0.015, 0.03)),
}
"""The weight decay that the boards selected for the finalist, and rates around its own."""

AROUND_ADAMW: Final[Sequence[tuple[str, Mapping[str, Setting]]]] = (
    *((peer, {}) for peer in ("adamw+average", "schedule-free-adamw", "cprop-adamw+average")),
    ("cprop-adamw+average", {"cprop_measure": "relative_3", "fused": False}),
    ("cprop-adamw+average", {"cprop_measure": "wiener"}),
)

EXPERIMENTS_AT_RATES: Final = (
    *(
        Experiment(
            f"finalist-rates-{workload}",
            f"Learning rates of the finalist and its controls: {title}",
            "beyond the paper",
            "No claim of the paper: is one scale per layer more than a smaller rate, or a decay?",
            [
                Variant(workload, optimizer, size, {**settings, "weight_decay": weight_decay}, lr=lr)
                for optimizer, settings in (*FINALISTS[:3], ("muon+inverse+average", LONG))
                for lr in lrs
            ],
            kind="rates",
            panels=("train_loss",),
        )
        for workload, title, size in WORKLOADS
        if workload in RATES
        for weight_decay, lrs in [RATES[workload]]
    ),
    Experiment(
        "candidate-rates-fmnist-fc",
        "Learning rates of candidates around AdamW: Fashion-MNIST, fully-connected network",
        "beyond the paper",
        "No claim of the paper: is a candidate ahead of Schedule-Free AdamW in runs of full length?",
        [
            Variant("fmnist-fc", optimizer, settings=settings, lr=lr)
            for optimizer, settings in AROUND_ADAMW
            for lr in (3e-4, 1e-3, 3e-3)
        ],
        kind="rates",
        panels=("train_loss",),
        first_seed=100,
    ),
)

BOARDS_OF_FINALISTS: Final = tuple(
    Scoreboard(
        f"finalists-{workload}",
        f"Finalists for the next rule: {title}",
        "beyond the paper",
        "No claim of the paper: is there a rule that is ahead of today's best optimizers?",
        [
            *scoreboard.rows(workload, PEERS, size),
            *(Variant(workload, optimizer, size, settings, own_rate=True) for optimizer, settings in FINALISTS),
        ],
        kind="scoreboard",
        first_timing=scoreboard.TIMINGS,
    )
    for workload, title, size in WORKLOADS
)

EXPERIMENTS: Final[Sequence[Experiment]] = at_the_papers_eps(
    (*EXPERIMENTS_OF_CANDIDATES, *BOARDS_OF_FINALISTS, *EXPERIMENTS_AT_RATES)
)
