"""The search for a better rule: an ordinary user of the laboratory, ``cprop-lab run EXPERIMENT --with research``.

The runs of its experiments are committed in ``evidence/``. So that a changed comment does not discard them, its
optimizers and measures have the laboratory's version of the code in their runs' ids, and not a digest of their source.
"""

from cprop_lab import Recipe, register_experiment, register_measure, register_optimizer
from cprop_lab.registry import lazy
from cprop_lab.run.recipes import ADAM, MUON, PRIMAL, Setting, pair_of_betas
from research.experiments import EXPERIMENTS
from research.measures import MEASURES

GPA = pair_of_betas(lazy("cprop_lab.run.averaging", "GPA"))
GPA_CPROP = pair_of_betas(lazy("research.averaging", "GPACProp"))
SCALE: dict[str, Setting] = {"c": 1.0, "measure": "normal"}

RECIPES = {
    "schedule-free-cprop": Recipe(
        "Schedule-Free CProp",
        pair_of_betas(lazy("research.averaging", "ScheduleFreeCProp")),
        settings={**ADAM, "c": 4.0},
        guess=3e-3,
        alone=True,
        scales="schedule-free-adamw",
    ),
    "gpa-cprop": Recipe("GPA CProp", GPA_CPROP, settings={**PRIMAL, **SCALE}, alone=True, scales="gpa-adamw"),
    "gpa-muon": Recipe("GPA Muon", GPA, settings=PRIMAL, guess=3e-3, alone=True, matrices=True),
    "gpa-cprop-muon": Recipe(
        "GPA CProp Muon",
        GPA_CPROP,
        settings={**PRIMAL, **SCALE},
        guess=3e-3,
        alone=True,
        scales="gpa-muon",
        matrices=True,
    ),
    "muon-vs": Recipe(
        "Muon-VS", pair_of_betas(lazy("research.muon", "MuonVS")), settings=MUON, guess=3e-3, matrices=True
    ),
    "muon-snr": Recipe(
        "Muon-SNR",
        pair_of_betas(lazy("research.muon", "MuonSNR")),
        settings={**MUON, "noise": 1.0},
        guess=3e-3,
        matrices=True,
    ),
}
for name, recipe in RECIPES.items():
    register_optimizer(name, recipe, version="")
for name, measure in MEASURES.items():
    register_measure(name, measure, version="")
for experiment in EXPERIMENTS:
    register_experiment(experiment)
