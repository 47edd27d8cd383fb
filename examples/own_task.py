"""Your own training task for ``cprop-lab compare``: three noisy spirals, classified by a small network.

    cd examples
    cprop-lab compare own_task:Spirals --optimizers sgd,adam --iterations 3000

Write ``data``, ``model`` and ``loss`` for yours; ``evaluate`` adds an accuracy and is optional.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cprop_lab import Task

Batch = tuple[Tensor, Tensor]


class Spirals(Task):
    """Which of three spirals does a point belong to?"""

    metric = "accuracy"

    def data(self) -> tuple[Batch, Batch]:
        """4,000 training and 1,000 test points, always the same."""
        generator = torch.Generator().manual_seed(0)
        label = torch.randint(3, (5000,), generator=generator)
        radius = torch.rand(5000, generator=generator)
        angle = 2 * math.pi * (1.5 * radius + label / 3) + 0.4 * torch.randn(5000, generator=generator)
        point = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        return (point[:4000], label[:4000]), (point[4000:], label[4000:])

    def model(self) -> nn.Module:
        """A network with two hidden layers."""
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        point, label = batch
        return cross_entropy(model(point), label)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss and the accuracy of a batch."""
        point, label = batch
        logits = model(point)
        return {"loss": cross_entropy(logits, label), "accuracy": (logits.argmax(1) == label).float().mean()}
