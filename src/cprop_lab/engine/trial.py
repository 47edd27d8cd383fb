"""What Ray Tune gets: a run as a trial, and a callback that watches the trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ray import tune

from cprop_lab.engine.progress import Progress
from cprop_lab.engine.train import train
from cprop_lab.run.evaluation import Evaluation
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store
from cprop_lab.workloads.source import Module, adopt, told

Sources = dict[str, dict[str, Module]]


def trial(config: dict[str, Any], sources: Sources) -> None:
    """A run, in its own process that Tune may kill, lose or reuse."""
    torch.set_num_threads(config["cpus"])
    name, text = config["run"]
    try:
        run(name, text, sources, Store(config["store"]), config["checkpoint_seconds"])
    except Exception as error:
        # Tune would retry, as it does when a process is killed; but the exception would be raised again.
        tune.report({"exception": told(error)})


def run(name: str, text: str, sources: Sources, store: Store, checkpoint_seconds: float) -> None:
    """Train what the driver asks for, with the driver's code.

    Raises:
        RuntimeError: if this process has other code than the one the run id was computed from.
    """
    specification = Specification.from_json(text)
    adopt(sources)
    if (here := run_id(specification)) != name:
        raise RuntimeError(
            f"run {name} would be run {here} on this node, which has another version of cprop-lab than the driver: "
            "install the same on all"
        )
    # Curves go to the store; Tune only gets the few numbers that the live table shows.
    shown = ("step", "train_loss", "seconds")
    train(specification, store, lambda row: tune.report({key: row[key] for key in shown}), checkpoint_seconds)


class Watch(tune.Callback):
    """Translates Tune's events to the laboratory's progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.errors: dict[Specification, str] = {}
        self._lost: set[Specification] = set()
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks, to restore a sweep. We restore from the store, and a terminal cannot be pickled.
        return {"progress": Progress(), "errors": {}, "_lost": set(), "_told": set()}

    @staticmethod
    def _specification(trial: Any) -> Specification:
        _, text = trial.config["run"]
        return Specification.from_json(text)

    def _tell(self, specification: Specification, error: str) -> None:
        """Report an error once, however many runs it ends."""
        line = error.splitlines()[-1]
        if line not in self._told:
            self._told.add(line)
            self.progress.failed(specification, line)

    def lost(self) -> set[Specification]:
        """Runs that ended with their process but may be restarted; their errors are forgotten."""
        lost, self._lost = self._lost, set()
        for specification in lost:
            del self.errors[specification]
        return lost

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Evaluation, **info: Any) -> None:
        """An evaluation, or an exception that ends the run."""
        specification = self._specification(trial)
        if "exception" in result:
            self.errors[specification] = result["exception"]
            self._tell(specification, result["exception"])
        elif "train_loss" in result:
            self.progress.evaluated(specification, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A run has ended."""
        if self._specification(trial) not in self.errors:
            self.progress.ended(self._specification(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A process was killed, and Tune retries."""
        self._tell(self._specification(trial), last_line(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A process was killed for the last time, or at a moment in which Tune gives up."""
        specification = self._specification(trial)
        self.errors[specification] = last_line(trial)
        self._tell(specification, self.errors[specification])
        if trial.should_recover():
            self._lost.add(specification)


def last_line(trial: Any) -> str:
    """An error's message, without its traceback."""
    # Not trial.get_error(), which reads Tune's copy in the storage: the first failure may not be there yet.
    file = trial.error_file
    lines = Path(file).read_text().strip().splitlines() if file else []
    return lines[-1] if lines else "unknown"
