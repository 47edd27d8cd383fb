"""One run to its end: from its checkpoint, if it has one, to stored curves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Final

import cprop
from cprop_lab.run.evaluation import Evaluation, Status
from cprop_lab.run.identity import run_id
from cprop_lab.run.provenance import provenance
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training, arithmetic
from cprop_lab.store import Store

__all__ = ["CHECKPOINT_SECONDS", "train"]

CHECKPOINT_SECONDS: Final = 30.0
"""Between two checkpoints, by default: at most this much work is lost when a run is killed."""
SHARE: Final = 1 / 20
"""Of a run's time, by default: more does not go into writing checkpoints, even if that makes them rarer."""


def train(
    specification: Specification,
    store: Store,
    on_evaluation: Callable[[Evaluation], object] = lambda _: None,
    checkpoint_seconds: float | None = None,
) -> Status:
    """Train to the end, from its checkpoint if there is one, and store the curves; a finished run is reused.

    Args:
        specification: the run.
        store: for curves and checkpoints.
        on_evaluation: called after every evaluation; if it raises, the run stops there and can be resumed.
        checkpoint_seconds: how often to write a checkpoint, at an evaluation or between two; by default every
            :data:`CHECKPOINT_SECONDS`, or so rarely that writing takes at most :data:`SHARE` of the time.

    Returns:
        How the run ended.
    """
    name = run_id(specification)
    if (kept := store.find(name)) is not None:
        return kept.status
    with arithmetic():
        training = resume(specification, store, name)
        pause = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
        written = time.monotonic()
        if not training.rows:
            on_evaluation(training.evaluate())
        while training.step < specification.iterations and not training.diverged:
            # In stretches that end at the evaluations, and are short enough to write checkpoints on time.
            every = specification.evaluate_every
            stop = min((training.step // every + 1) * every, specification.iterations)
            training.advance(min(stop - training.step, stretch(training, pause)))
            if training.step == stop:
                on_evaluation(training.evaluate())
            if (begun := time.monotonic()) - written > pause:
                store.save_checkpoint(name, training.state_dict())
                written = time.monotonic()
                if checkpoint_seconds is None:
                    pause = max(CHECKPOINT_SECONDS, (written - begun) * (1 / SHARE - 1))
    status: Status = "diverged" if training.diverged else "finished"
    store.write(specification, status, training.rows, provenance(training))
    return status


def stretch(training: Training, seconds: float) -> int:
    """How many steps to take before looking at the clock again."""
    if training.seconds == 0:
        return 2  # the first is not timed
    return max(1, int(seconds / 4 * training.step / training.seconds))


def resume(specification: Specification, store: Store, name: str) -> Training:
    """A run from its checkpoint, or from the start if there is none or it is damaged."""
    training = Training(specification)
    try:
        state = store.load_checkpoint(name)
        if state is not None:
            training.load_state_dict(state)
    except cprop.CheckpointError as error:
        warnings.warn(f"run {name} starts from the beginning: {error}", stacklevel=2)
        store.forget_checkpoint(name)
        training = Training(specification)
    return training
