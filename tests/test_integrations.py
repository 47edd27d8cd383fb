"""A monitor's samples arrive where they are sent. Lightning and Transformers in whole runs: see the examples."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import cprop
from cprop.diagnostics.summary import BINS
from cprop.integrations import figure, loggers, terminal


@pytest.fixture
def watch():
    """Train a little with some sinks, and give back the monitor."""

    def watch(*sinks, steps=30):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
        optimizer = cprop.CPropSGD(model.parameters(), lr=0.1)
        monitor = cprop.Monitor(optimizer, model.named_parameters(), every=10, batch_size=8, sinks=sinks)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 7)).square().mean().backward()
            optimizer.step()
        return monitor

    return watch


def test_json_lines(watch, tmp_path):
    monitor = watch(loggers.json_lines(tmp_path / "logs" / "cprop.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "cprop.jsonl").read_text().splitlines()]
    assert lines == [{"step": sample.step, **sample.scalars()} for sample in monitor.samples]


def test_tensorboard(watch, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        monitor = watch(loggers.tensorboard(writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    written = [(event.step, event.value) for event in events.Scalars("cprop/2/mean_scale")]
    assert written == [(s.step, pytest.approx(s.layers["2"].mean_scale)) for s in monitor.samples]
    (*_, last) = events.Histograms("cprop/all layers/scale")
    assert last.histogram_value.num == monitor.samples[-1].total.elements
    assert sum(last.histogram_value.bucket) == pytest.approx(last.histogram_value.num)


def test_mlflow(watch, tmp_path):
    """Where MLflow is installed; it is no part of the development environment."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("cprop"))
    monitor = watch(loggers.mlflow(client, run.info.run_id))
    history = client.get_metric_history(run.info.run_id, "cprop/mean_scale")
    assert [(m.step, m.value) for m in history] == [(s.step, s.total.mean_scale) for s in monitor.samples]


def test_wandb(watch, tmp_path):
    """Where Weights & Biases is installed, offline; it is no part of the development environment."""
    wandb = pytest.importorskip("wandb")
    with wandb.init(project="cprop", dir=tmp_path, mode="offline") as run:
        monitor = watch(loggers.wandb(run))
        assert run.summary["cprop/step"] == monitor.samples[-1].step
        assert run.summary["cprop/2/mean_scale"] == monitor.samples[-1].layers["2"].mean_scale


def test_the_table_has_a_row_a_layer_and_the_advice(watch, monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    monitor = watch(terminal.printer(console))
    monkeypatch.setattr(type(monitor), "advice", lambda _: ["lower cprop_eps"])
    console.print(terminal.table(monitor))
    printed = stream.getvalue()
    for step in (10, 20, 30):
        assert f"CProp, step {step}: mean scale " in printed
    assert f"{monitor.samples[-1].layers['2'].mean_scale:.3f}" in printed
    assert "noise scale" in printed
    assert "lower cprop_eps" in printed


def test_the_figure_has_a_panel_a_layer(watch):
    monitor = watch()
    drawn = figure.scale_over_time(monitor.samples, "A title")
    everything, *layers = drawn.axes[:3]
    assert everything.get_title(loc="left") == "all layers"
    assert [axes.get_title(loc="left") for axes in layers] == ["0", "2"]
    shares = everything.collections[0].get_array().reshape(BINS, len(monitor.samples))
    assert shares[:, -1].tolist() == pytest.approx(list(monitor.samples[-1].total.histogram))
    with pytest.raises(ValueError, match="got 1 samples: a figure over time needs at least 2"):
        figure.scale_over_time(monitor.samples[:1])


def few_steps(p, optimizer, steps=4):
    """The steps of one training, each of which is given back as it ends."""
    for step in range(1, steps + 1):
        p.grad = torch.randn(3)
        optimizer.step()
        yield step


def test_a_callback_of_transformers_serves_one_training_after_another():
    pytest.importorskip("transformers")
    from cprop.integrations.transformers import MonitorCallback

    p, told = nn.Parameter(torch.zeros(3)), []
    model = SimpleNamespace(named_parameters=lambda: [("fc.weight", p)])
    optimizer = cprop.CPropSGD([p], lr=0.1)
    callback = MonitorCallback(every=2, sinks=[told.append])

    def train(optimizer, ends=True):
        state = SimpleNamespace(log_history=[], global_step=0)
        callback.on_train_begin(None, state, None, model=model, optimizer=optimizer)
        for state.global_step in few_steps(p, optimizer):
            callback.on_step_end(None, state, None)
        if ends:
            callback.on_train_end(None, state, None)
        return [(entry["step"], "cprop/fc/mean_scale" in entry) for entry in state.log_history]

    assert train(optimizer) == [(2, True), (4, True)]
    assert train(optimizer, ends=False) == [(2, True), (4, True)]  # as when the training is interrupted
    assert train(optimizer) == [(2, True), (4, True)]
    assert [sample.step for sample in told] == [2, 4, 6, 8, 10, 12]  # none by two monitors
    assert train(torch.optim.SGD([p], lr=0.1)) == []
    assert callback.monitor is None  # and what the last training gave is no longer advice


@pytest.mark.slow
def test_a_callback_of_lightning_serves_one_training_after_another():
    pytest.importorskip("lightning")
    from cprop.integrations.lightning import MonitorCallback

    p, logged = nn.Parameter(torch.zeros(3)), []
    module = SimpleNamespace(named_parameters=lambda: [("fc.weight", p)])
    logger = SimpleNamespace(log_metrics=lambda numbers, step: logged.append(step))
    trainer = SimpleNamespace(optimizers=[cprop.CPropSGD([p], lr=0.1)], loggers=[logger], global_step=0)
    callback = MonitorCallback(every=2)
    for ends in (True, False, True):  # one is interrupted
        callback.on_fit_start(trainer, module)
        list(few_steps(p, *trainer.optimizers))
        if ends:
            callback.on_fit_end(trainer, module)
    assert len(logged) == 6  # none by two monitors
