"""Each figure of the paper as a named experiment: the catalogue, how long to run, and how an experiment is run."""

from cprop_lab.experiments.catalogue import EXPERIMENTS, register_experiment
from cprop_lab.experiments.experiment import Experiment, Variant
from cprop_lab.experiments.presets import PRESETS, Preset

__all__ = ["EXPERIMENTS", "PRESETS", "Experiment", "Preset", "Variant", "register_experiment"]
