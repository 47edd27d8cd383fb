"""Examples of user-defined tasks (``module:Task``), small enough to train in a second."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from cprop_lab import Task


class Blobs(Task):
    """Two classes of points, with noise, dropout and an accuracy: everything that a run must save and restore."""

    metric = "accuracy"

    def __init__(self, dropout=0.2):
        self.dropout = dropout

    def data(self):
        points = torch.randn(600, 8, generator=torch.Generator().manual_seed(7))
        labels = (points[:, 0] + 0.5 * points[:, 1] > 0).long()
        return (points[:500], labels[:500]), (points[500:], labels[500:])

    def model(self):
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def prepare(self, batch, training):
        points, labels = batch
        return (points + 0.1 * torch.randn_like(points) if training else points), labels

    def loss(self, model, batch):
        points, labels = batch
        return cross_entropy(model(dropout(points, self.dropout, model.training)), labels)

    def evaluate(self, model, batch):
        points, labels = batch
        logits = model(points)
        return {"loss": cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


class Slow(Blobs):
    """The same with a few milliseconds per step: slow enough to be killed during training."""

    def prepare(self, batch, training):
        import time

        time.sleep(0.004 if training else 0)
        return super().prepare(batch, training)


class Failing(Slow):
    """The same, until its tenth step. It writes down how often it was started."""

    def __init__(self, log=""):
        super().__init__()
        self.log, self.steps = log, 0

    def data(self):
        if self.log:
            with Path(self.log).open("a") as file:
                file.write("started\n")
        return super().data()

    def before_step(self, model):
        self.steps += 1
        if self.steps == 10:
            raise IndexError("too far")


class Guarded(Slow):
    """The same. While there is a folder ``gate``, no process gets beyond its 300th step without a file ``pass`` in it.

    A pass is for one process: it is deleted.
    """

    def __init__(self, gate=""):
        super().__init__()
        self.gate, self.steps = Path(gate), 0

    def before_step(self, model):
        import time

        self.steps += 1
        while self.steps == 300 and self.gate.is_dir():
            with suppress(FileNotFoundError):
                (self.gate / "pass").unlink()
                break
            time.sleep(0.01)


class Logged(Slow):
    """The same. It writes down which process reads its data or makes a network."""

    def __init__(self, log=""):
        super().__init__()
        self.log = log

    def note(self, what):
        with Path(self.log).open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def data(self):
        self.note("data")
        return super().data()

    def model(self):
        self.note("model")
        return super().model()


class Rows(Task):
    """A map-style dataset instead of tensors, and no accuracy."""

    def data(self):
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        rows = [(a, 3 * a + 1) for a in x]
        return rows[::2], rows[1::2]

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
