"""The paper's fully connected network on Fashion-MNIST, for benchmarks with real training."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cprop_lab.models import fully_connected
from cprop_lab.workloads.data import ENVIRONMENT, FASHION_MNIST, images

BATCH = 32


def add_arguments(parser: argparse.ArgumentParser, iterations: int) -> None:
    """Command-line arguments of every comparison on this network."""
    parser.add_argument("--data", type=Path, help="folder that holds fashion_mnist (default: $CPROP_LAB_DATA)")
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and the loss curves")


def training_images(data: Path | None) -> tuple[Tensor, Tensor]:
    """The 60,000 training images as vectors in [0, 1], and their labels.

    Args:
        data: a folder that contains ``fashion_mnist``; by default the environment variable
            ``CPROP_LAB_DATA``, or else the public data set.
    """
    if data is not None:
        os.environ[ENVIRONMENT] = str(data.absolute())
    pixels, labels = images(FASHION_MNIST, training=True, channels=1)
    return pixels.float().div_(255).flatten(1), labels


def network(seed: int) -> nn.Sequential:
    """784-300-100-10 with ReLU (the paper's appendix A.1)."""
    torch.manual_seed(seed)
    return fully_connected()


class Training:
    """A training run that can be continued in stages, with the time of its steps."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.images, self.labels = images, labels
        self.model = network(seed)
        self.optimizer = make(self.model.parameters())
        self.order = torch.Generator().manual_seed(seed)
        self.iterations, self.seconds = 0, 0.0
        self.curve: list[tuple[int, float, float]] = []

    def advance(self, iterations: int) -> None:
        """Continue training, and record the loss over all training images; recording is not timed."""
        batches = torch.randint(0, len(self.images), (iterations, BATCH), generator=self.order)
        start = time.perf_counter()
        for batch in batches:
            loss = nn.functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.seconds += time.perf_counter() - start
        self.iterations += iterations
        with torch.no_grad():
            full = nn.functional.cross_entropy(self.model(self.images), self.labels).item()
        self.curve.append((self.iterations, self.seconds, full))

    def loss(self, points: int = 4) -> float:
        """The mean of the last few recorded losses: single ones fluctuate."""
        return sum(loss for *_, loss in self.curve[-points:]) / len(self.curve[-points:])
