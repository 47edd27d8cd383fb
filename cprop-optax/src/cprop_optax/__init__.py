"""CProp for optax: learning rates that shrink where gradients disagree.

Wrap any optax optimizer with :func:`cprop`.
"""

from cprop_optax._adam import CPropAdamState, scale_by_cprop_adam
from cprop_optax._conformity import MEASURES, Measure, Moments, conformity_scale
from cprop_optax._statistics import ConformityState
from cprop_optax._transform import CPropState, cprop, cprop_scales, scale_by_conformity

__version__ = "0.1.0.dev0"

__all__ = [
    "MEASURES",
    "CPropAdamState",
    "CPropState",
    "ConformityState",
    "Measure",
    "Moments",
    "conformity_scale",
    "cprop",
    "cprop_scales",
    "scale_by_conformity",
    "scale_by_cprop_adam",
]
