"""Wrap Adam, and look at the scale
=================================

One line changes. What does it do? A small network learns which points lie inside a circle, from labels of which a tenth
are wrong, with Adam and with Adam + CProp.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import cprop


def points(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and whether they lie inside the circle; one label in ten is wrong."""
    inputs = torch.randn(number, 2, generator=generator)
    wrong = torch.rand(number, generator=generator) < 0.1
    return inputs, ((inputs.norm(dim=1) < 1.2) ^ wrong).long()


# %%
# The usual training loop. Only the function that builds the optimizer differs.


Curve = list[tuple[int, float]]


def train(build: Callable[..., Optimizer], steps: int = 1500) -> tuple[Curve, Optimizer]:
    """Losses on held-out data by step, and the final optimizer."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(64, 2))
    optimizer = build(model.parameters())
    held_out, truth = points(4000, torch.Generator().manual_seed(2))
    curve = []
    for step in range(1, steps + 1):
        inputs, labels = points(32, generator)
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                curve.append((step, cross_entropy(model(held_out), truth).item()))
    return curve, optimizer


plain, _ = train(lambda params: torch.optim.Adam(params, lr=1e-2))
scaled, optimizer = train(lambda params: cprop.CProp(torch.optim.Adam(params, lr=1e-2)))

# %%
# At this learning rate, Adam keeps jumping around. CProp shrinks steps where the sign is uncertain and leaves the
# others alone: the scales spread over all of [0, 1].

scales = torch.cat([scale.flatten() for _, scale in optimizer.scales()])

figure, (left, right) = plt.subplots(1, 2)
left.plot(*zip(*plain, strict=True), "--", label="Adam")
left.plot(*zip(*scaled, strict=True), label="CProp(Adam)")
left.set(xlabel="steps", ylabel="loss on held-out data", title="the same learning rate")
left.set_ylim(0.3, 0.45)
left.legend()
right.hist(scales, bins=40, range=(0, 1), color="tab:gray")
right.axvline(scales.mean(), color="black", linewidth=1, label=f"mean {scales.mean():.2f}")
right.set(xlabel="scale", ylabel="parameters", title="scales at the end")
right.legend()

for name, curve in (("Adam", plain), ("CProp(Adam)", scaled)):
    late = sum(loss for _, loss in curve[-10:]) / 10
    print(f"{name}: mean loss over the last 500 steps {late:.3f}")
