"""Sinks that send a monitor's samples to a logger. They take the logger as an argument, and import none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cprop.diagnostics.monitor import Sink
from cprop.diagnostics.summary import BINS, Sample

__all__ = ["json_lines", "mlflow", "tensorboard", "wandb"]


def json_lines(path: str | Path) -> Sink:
    """Append every sample to a file as one line of JSON.

    Args:
        path: the file. It is reopened for each sample, so that nothing is lost if the run is killed.

    Example:
        >>> import tempfile
        >>> from cprop.diagnostics.summary import Layer
        >>> layer = Layer(2, 0.5, (0.0,) * BINS, 0.0, 0.0, signal=1.0, noise=4.0, signal_error=0.1)
        >>> path = Path(tempfile.mkdtemp()) / "cprop.jsonl"
        >>> json_lines(path)(Sample(7, layer, {}))
        >>> json.loads(path.read_text())["cprop/signal_to_noise"]
        0.25
    """
    target = Path(path)

    def sink(sample: Sample) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": sample.step, **sample.scalars()}) + "\n")

    return sink


def tensorboard(writer: Any) -> Sink:
    """Log scalars and histograms to a ``torch.utils.tensorboard.SummaryWriter``.

    Args:
        writer: the writer; you close it.
    """

    def sink(sample: Sample) -> None:
        for name, value in sample.scalars().items():
            writer.add_scalar(name, value, sample.step)
        for name, layer in {"all layers": sample.total, **sample.layers}.items():
            counts = [share * layer.elements for share in layer.histogram]
            middles = [(i + 0.5) / BINS for i in range(BINS)]
            writer.add_histogram_raw(
                f"cprop/{name}/scale",
                min=0.0,
                max=1.0,
                num=layer.elements,
                sum=layer.mean_scale * layer.elements,
                sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
                bucket_limits=[(i + 1) / BINS for i in range(BINS)],
                bucket_counts=counts,
                global_step=sample.step,
            )

    return sink


def wandb(run: Any) -> Sink:
    """Log scalars to a Weights & Biases run, with ``cprop/step`` as the step metric.

    Args:
        run: the run that ``wandb.init()`` returned.
    """
    run.define_metric("cprop/*", step_metric="cprop/step")

    def sink(sample: Sample) -> None:
        # Without step=: W&B's own counter must not go backwards, and belongs to the training loop.
        run.log({"cprop/step": sample.step, **sample.scalars()})

    return sink


def mlflow(client: Any, run_id: str) -> Sink:
    """Log scalars to an MLflow run.

    Args:
        client: an ``mlflow.MlflowClient``.
        run_id: the run's id, such as ``mlflow.active_run().info.run_id``.
    """

    def sink(sample: Sample) -> None:
        for name, value in sample.scalars().items():
            client.log_metric(run_id, name, value, step=sample.step)

    return sink
