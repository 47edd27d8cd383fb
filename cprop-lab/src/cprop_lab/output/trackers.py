"""Export of curves to TensorBoard, MLflow and Weights & Biases.

Curves are exported from the store afterwards: a run must not fail because a tracking server did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cprop_lab.run.evaluation import BINS
from cprop_lab.store import Run

__all__ = ["TRACKERS", "export"]

SCALARS: Final = ("train_loss", "test_loss", "accuracy", "perplexity", "lr", "mean_scale", "seconds")


def rows(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
    """The numbers of a run, one evaluation at a time; missing ones are left out."""
    columns = {name: run.column(name) for name in SCALARS}
    for i, step in enumerate(run.column("step")):
        yield int(step), {name: float(c[i]) for name, c in columns.items() if not math.isnan(c[i])}


def title(run: Run) -> str:
    """A readable, unique name."""
    s = run.specification
    return f"{s.workload}/{s.label} lr {s.lr:g}/seed {s.seed} {run.run_id[:6]}"


def tensorboard(runs: Iterable[Run], target: str) -> None:
    """Write event files to a folder."""
    from torch.utils.tensorboard import SummaryWriter

    edges = [i / BINS for i in range(BINS + 1)]
    for run in runs:
        with SummaryWriter(str(Path(target) / title(run))) as writer:
            for (step, values), shares in zip(rows(run), run.histogram(), strict=True):
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                if not math.isnan(shares[0]):
                    writer.add_histogram_raw(
                        "scale",
                        min=0.0,
                        max=1.0,
                        num=1.0,
                        sum=values.get("mean_scale", 0.0),
                        sum_squares=0.0,
                        bucket_limits=edges[1:],
                        bucket_counts=shares.tolist(),
                        global_step=step,
                    )


def mlflow(runs: Iterable[Run], target: str) -> None:
    """Log runs to an MLflow store, such as ``sqlite:///mlflow.db`` or a server's address."""
    import mlflow as tracking

    tracking.set_tracking_uri(target)
    for run in runs:
        tracking.set_experiment(run.specification.workload)
        with tracking.start_run(run_name=title(run)):
            tracking.log_params({**flat(run.specification.to_dict()), "identity": run.run_id})
            for step, values in rows(run):
                tracking.log_metrics(values, step=step)


def wandb(runs: Iterable[Run], target: str) -> None:
    """Log runs to a Weights & Biases project; ``WANDB_MODE=offline`` keeps them on this machine."""
    import wandb as tracking

    for run in runs:
        logged = tracking.init(project=target, name=title(run), id=run.run_id, config=run.specification.to_dict())
        for step, values in rows(run):
            logged.log(values, step=step)
        logged.finish()


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one flat dictionary."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


TRACKERS: Final[Mapping[str, Callable[[Iterable[Run], str], None]]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
}


def export(runs: Iterable[Run], tracker: str, target: str) -> None:
    """Export runs to a tracker.

    Raises:
        ValueError: if there is no such tracker.
        ImportError: if its package is not installed.
    """
    if tracker not in TRACKERS:
        raise ValueError(f"unknown tracker {tracker!r}: choose one of {', '.join(TRACKERS)}")
    try:
        TRACKERS[tracker](runs, target)
    except ImportError as error:
        raise ImportError(f"{tracker} is not installed ({error}): pip install {tracker}") from error
