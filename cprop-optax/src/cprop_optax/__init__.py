"""CProp for optax: learning rates that shrink where gradients disagree.

Put :func:`cprop` around any optax optimizer.
"""

from cprop_optax._conformity import MEASURES, Measure, Moments, conformity_scale
from cprop_optax._transform import ConformityState, CPropState, cprop, cprop_scales, scale_by_conformity

__version__ = "0.1.0.dev0"

__all__ = [
    "MEASURES",
    "CPropState",
    "ConformityState",
    "Measure",
    "Moments",
    "conformity_scale",
    "cprop",
    "cprop_scales",
    "scale_by_conformity",
]
