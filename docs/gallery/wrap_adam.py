"""Wrap Adam, and look at the scale
=================================

One line changes. What does it do? A small network learns which points lie inside a circle, from labels of which a
tenth are wrong, with Adam and with CProp around Adam.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch.optim import Optimizer

import cprop


def points(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the plane, and whether they lie inside the circle; one label in ten is wrong."""
    inputs = torch.randn(number, 2, generator=generator)
    wrong = torch.rand(number, generator=generator) < 0.1
    return inputs, ((inputs.norm(dim=1) < 1.2) ^ wrong).long()


# %%
# The training loop is the usual one. It is handed a function that builds the optimizer; everything else is the same.


def train(build: Callable[..., Optimizer], steps: int = 1500) -> tuple[list[tuple[int, float]], Optimizer]:
    """Losses on held-out data by step, and the optimizer as it is at the end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )
    optimizer = build(model.parameters())
    held_out = points(4000, torch.Generator().manual_seed(2))
    curve = []
    for step in range(1, steps + 1):
        inputs, labels = points(32, generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                curve.append((step, torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()))
    return curve, optimizer


plain, _ = train(lambda params: torch.optim.Adam(params, lr=1e-2))
scaled, optimizer = train(lambda params: cprop.CProp(torch.optim.Adam(params, lr=1e-2)))  # the one line

# %%
# Adam at this learning rate goes on jumping about. CProp makes the same steps smaller wherever their signs do not hold,
# and leaves them alone where they do: the scales are spread over the whole of [0, 1].

scales = torch.cat([scale.flatten() for _, scale in optimizer.scales()])

figure, (left, right) = plt.subplots(1, 2)
left.plot(*zip(*plain, strict=True), "--", label="Adam")
left.plot(*zip(*scaled, strict=True), label="CProp(Adam)")
left.set(xlabel="steps", ylabel="loss on held-out data", ylim=(0.3, 0.6), title="the same learning rate")
left.legend()
right.hist(scales, bins=40, range=(0, 1), color="tab:gray")
right.axvline(scales.mean(), color="black", linewidth=1, label=f"mean {scales.mean():.2f}")
right.set(xlabel="scale", ylabel="parameters", title="scales at the end")
right.legend()

print(f"mean loss over the last 500 steps: Adam {sum(y for _, y in plain[-10:]) / 10:.3f}, ", end="")
print(f"CProp(Adam) {sum(y for _, y in scaled[-10:]) / 10:.3f}")
