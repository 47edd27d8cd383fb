"""CProp: learning rates that shrink where gradients disagree.

Wrap any optimizer with :class:`CProp`, or use a native one such as :class:`CPropAdam`.
"""

from cprop.checkpoint import CheckpointError
from cprop.conformity import conformity_scale
from cprop.diagnostics import Monitor
from cprop.measures import MEASURES, Measure
from cprop.moments import Moments
from cprop.optimizers import CProp, CPropAdaBound, CPropAdam, CPropAdamW, CPropRMSprop, CPropSGD
from cprop.optimizers.base import ConformityOptimizer
from cprop.statistics import PREFIX

__version__ = "0.1.0.dev0"

__all__ = [
    "MEASURES",
    "PREFIX",
    "CProp",
    "CPropAdaBound",
    "CPropAdam",
    "CPropAdamW",
    "CPropRMSprop",
    "CPropSGD",
    "CheckpointError",
    "ConformityOptimizer",
    "Measure",
    "Moments",
    "Monitor",
    "conformity_scale",
]
