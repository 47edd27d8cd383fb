"""A monitor callback for Lightning."""

from __future__ import annotations

import lightning.pytorch as pl

from cprop.diagnostics.monitor import Monitor
from cprop.diagnostics.summary import Sample
from cprop.optimizers.base import ConformityOptimizer

__all__ = ["MonitorCallback"]


class MonitorCallback(pl.Callback):
    """Monitors CProp's optimizers, logs to the trainer's loggers, and gives advice at the end.

    The optimizer itself needs no callback: return it from ``configure_optimizers`` like any other.

    Args:
        every: steps between samples.
        batch_size: examples per step, over all devices and accumulated gradients, for the noise scale.
    """

    def __init__(self, every: int = 100, batch_size: int | None = None) -> None:
        self.every, self.batch_size = every, batch_size
        self.monitors: list[Monitor] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to all CProp optimizers, and detach from earlier ones."""
        for monitor in self.monitors:
            monitor.close()  # still open if the last training was interrupted

        def log(sample: Sample) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(sample.scalars(), step=trainer.global_step)

        self.monitors = [
            Monitor(optimizer, pl_module.named_parameters(), self.every, self.batch_size, [log])
            for optimizer in trainer.optimizers
            if isinstance(optimizer, ConformityOptimizer)
        ]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach, and log the advice."""
        for monitor in self.monitors:
            monitor.close()
            for line in monitor.advice():
                pl.utilities.rank_zero_info(f"CProp: {line}")
