"""The scale over time, layer by layer
====================================

A monitor takes a sample every few steps, and ``scale_over_time`` draws them, as in the paper's figure 8. Here, a small
convolutional network learns the orientation of noisy stripes.
"""

import math
from collections import OrderedDict

import torch
from torch import nn

import cprop
from cprop.integrations.figure import scale_over_time

torch.manual_seed(0)
layers = {
    "conv1": nn.Conv2d(1, 8, 3, padding=1),
    "relu1": nn.ReLU(),
    "pool": nn.MaxPool2d(2),
    "conv2": nn.Conv2d(8, 16, 3, padding=1),
    "relu2": nn.ReLU(),
    "average": nn.AdaptiveAvgPool2d(2),
    "flatten": nn.Flatten(),
    "hidden": nn.Linear(64, 32),
    "relu3": nn.ReLU(),
    "output": nn.Linear(32, 4),
}
model = nn.Sequential(OrderedDict(layers))
optimizer = cprop.CPropAdam(model.parameters(), lr=3e-3)
monitor = cprop.Monitor(optimizer, model.named_parameters(), every=20, batch_size=32)

# %%
# Stripes in one of four orientations, with random phase and equally strong noise.

y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
for _ in range(1000):
    labels = torch.randint(4, (32,))
    angle = labels * math.pi / 4
    along = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
    stripes = torch.sin(along + 2 * math.pi * torch.rand(32, 1, 1)) + torch.randn(32, 12, 12)
    loss = nn.functional.cross_entropy(model(stripes[:, None]), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

figure = scale_over_time(monitor.samples, "distribution of the scale")

# %%
# The layers behave differently, which a single learning rate cannot. What the monitor says:

total = monitor.samples[-1].total
print(f"mean scale {total.mean_scale:.2f}, noise scale {total.noise_scale(32):,.0f} examples")
print("\n".join(monitor.advice()) or "no advice")
