"""How a rule runs: as a for-loop, foreach, or fused. The rules know nothing of it."""

from cprop.execution.choice import Implementation, check_implementation, choose_implementation, prepare
from cprop.execution.job import Job, draw_of, run_all

__all__ = [
    "Implementation",
    "Job",
    "check_implementation",
    "choose_implementation",
    "draw_of",
    "prepare",
    "run_all",
]
