"""What Ray Tune is given: a run as a trial, and who watches the trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ray import tune

from cprop_lab.progress import Progress
from cprop_lab.results import Row, Store, identify
from cprop_lab.specification import Specification
from cprop_lab.training import train
from cprop_lab.workloads.source import Module, adopt


def trial(config: dict[str, Any], sources: dict[str, dict[str, Module]]) -> None:
    """A run, in a process of its own that Tune may kill, lose or use again.

    Raises:
        RuntimeError: if this process would run other code than the driver has named the run by.
    """
    name, text = config["run"]
    specification = Specification.from_json(text)
    adopt(sources)
    if (here := identify(specification)) != name:
        raise RuntimeError(
            f"run {name} would be run {here} on this node, which has another version of cprop-lab than the driver: "
            "install the same on all"
        )
    torch.set_num_threads(config["cpus"])
    train(
        specification,
        Store(config["store"]),
        # Rows go to the store; Tune hears of the few numbers that the table shows.
        lambda row: tune.report({"step": row["step"], "train_loss": row["train_loss"], "seconds": row["seconds"]}),
        config["checkpoint_seconds"],
    )


class Watch(tune.Callback):
    """Tells of the trials in the laboratory's own terms."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.errors: dict[Specification, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune writes its callbacks down, to restore a sweep by. We restore from the store, and a terminal cannot be.
        return {"progress": Progress(), "errors": {}}

    @staticmethod
    def _specification(trial: Any) -> Specification:
        _, text = trial.config["run"]
        return Specification.from_json(text)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Row, **info: Any) -> None:
        """A row."""
        if "train_loss" in result:
            self.progress.row(self._specification(trial), result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """An end."""
        self.errors.pop(self._specification(trial), None)
        self.progress.ended(self._specification(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A failure, after which Tune tries again."""
        self.progress.failed(self._specification(trial), last_line(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A failure for good."""
        specification = self._specification(trial)
        self.errors[specification] = last_line(trial)
        self.progress.failed(specification, self.errors[specification])


def last_line(trial: Any) -> str:
    """What an error says, without the way it took."""
    # Not trial.get_error(), which reads Tune's copy in the storage: the first failure may not have come there yet.
    file = trial.error_file
    lines = Path(file).read_text().strip().splitlines() if file else []
    return lines[-1] if lines else "unknown"
