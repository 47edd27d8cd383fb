"""A monitor callback for Transformers' ``Trainer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from cprop.diagnostics.monitor import Monitor, Sink
from cprop.diagnostics.summary import Sample
from cprop.optimizers.base import ConformityOptimizer

__all__ = ["MonitorCallback"]

logger = logging.get_logger(__name__)


class MonitorCallback(TrainerCallback):
    """Monitors CProp's optimizer, saves the samples in ``state.log_history``, and gives advice at the end.

    The trainer's own trackers run before your callbacks, and do not see these entries. Pass them as sinks instead,
    such as ``loggers.wandb(wandb.run)``.

    The optimizer itself needs no callback: pass it as ``optimizers=(optimizer, scheduler)``, or its class as
    ``optimizer_cls_and_kwargs``.

    Args:
        every: steps between samples.
        batch_size: examples per step, over all devices and accumulated gradients, for the noise scale.
        sinks: called with every sample, see :mod:`cprop.integrations.loggers`.
    """

    def __init__(self, every: int = 100, batch_size: int | None = None, sinks: Sequence[Sink] = ()) -> None:
        self.every, self.batch_size, self.sinks = every, batch_size, sinks
        self.monitor: Monitor | None = None
        self._told: Sample | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach to the optimizer if it is a CProp optimizer, and detach from the earlier one."""
        if self.monitor is not None:
            self.monitor.close()  # still open if the last training was interrupted
        self.monitor = self._told = None
        optimizer = kwargs.get("optimizer")
        if not isinstance(optimizer, ConformityOptimizer):
            optimizer = getattr(optimizer, "optimizer", None)  # inside Accelerate's wrapper
        if isinstance(optimizer, ConformityOptimizer):
            self.monitor = Monitor(optimizer, model.named_parameters(), self.every, self.batch_size, self.sinks)
        else:
            logger.warning("CProp: the trainer's optimizer is not a CProp optimizer, so there is nothing to monitor")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Append a new sample to the trainer's history, which is saved with its checkpoints."""
        if self.monitor is not None and self.monitor.samples and self.monitor.samples[-1] is not self._told:
            self._told = self.monitor.samples[-1]
            state.log_history.append({"step": state.global_step, **self._told.scalars()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach, and log the advice."""
        if self.monitor is not None:
            self.monitor.close()
            for line in self.monitor.advice():
                logger.warning("CProp: %s", line)
