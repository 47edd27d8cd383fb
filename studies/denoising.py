"""Denoising diffusion on small images: a task of one's own, on which noise is what limits training.

Every example is an image with a noise level and a noise of its own; in training, both are drawn anew in every step. So
a gradient of a small batch is mostly noise, however small the network's error has become.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, mse_loss

from cprop_lab import Task
from cprop_lab.workloads import data

__all__ = ["FashionDenoiser"]

Batch = tuple[Tensor, Tensor, Tensor]
"""Images, noise levels in [0, 1], and noises."""

FREQUENCIES = 16
"""Sines and cosines that tell a network the noise level."""


class ResidualMLP(nn.Module):
    """Predicts the noise in a flat image, with two residual blocks."""

    def __init__(self, pixels: int, width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Linear(pixels + 2 * FREQUENCIES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, pixels))

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        """The noise."""
        phases = level.unsqueeze(1) * math.pi * torch.arange(1, FREQUENCIES + 1, device=level.device)
        x = self.enter(torch.cat([noisy, phases.sin(), phases.cos()], dim=1))
        for block in self.blocks:
            x = x + block(x)
        noise: Tensor = self.leave(x)
        return noise


class FashionDenoiser(Task):
    """The noise in Fashion-MNIST's images at 14 x 14 pixels, predicted by a residual MLP under a cosine noise schedule.

    Its loss is the mean squared error of the noise. Evaluation uses one fixed noise per image, and noise levels that
    cover [0, 1] evenly.
    """

    def data(self) -> tuple[Batch, Batch]:
        """All 60,000 and 10,000 images, between -1 and 1."""
        return tuple(self._split(training) for training in (True, False))  # type: ignore[return-value]

    def _split(self, training: bool) -> Batch:
        pixels, _ = data.images(data.FASHION_MNIST, training, channels=1)
        images = avg_pool2d(pixels.float(), 2).flatten(1) / 127.5 - 1
        generator = torch.Generator().manual_seed(int(training))
        levels = (torch.randperm(len(images), generator=generator) + 0.5) / len(images)
        return images, levels, torch.randn(images.shape, generator=generator)

    def model(self) -> nn.Module:
        """A residual MLP."""
        return ResidualMLP(14 * 14)

    def prepare(self, batch: Batch, training: bool) -> Batch:
        """Draw new levels and noises in training."""
        images, levels, noises = batch
        return (images, torch.rand_like(levels), torch.randn_like(noises)) if training else batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean squared error of the predicted noise."""
        images, levels, noises = batch
        angle = levels.unsqueeze(1) * (math.pi / 2)
        return mse_loss(model(angle.cos() * images + angle.sin() * noises, levels), noises)
