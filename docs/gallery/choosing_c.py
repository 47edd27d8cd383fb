"""Choosing c
==========

The overconfidence ``c`` decides how much evidence is enough. A toy problem shows both sides: a hundred parameters with
curvatures from 0.01 to 1 descend under noise. Halfway through, the minimum moves, as it does in training when the data
or the layers above change.
"""

import math

import matplotlib.pyplot as plt
import torch

import cprop

CURVATURE = torch.logspace(-2, 0, 100)
STEPS, MOVES = 3000, 1500
CS = (1.0, 2.0, 4.0, 8.0, math.inf)

# %%
# Settings can differ between param groups. So one optimizer runs all five, each with its own parameters and the same
# noise.

torch.manual_seed(0)
copies = [torch.nn.Parameter(torch.full((100,), 3.0)) for _ in CS]
optimizer = cprop.CPropSGD([{"params": [w], "cprop_c": c} for w, c in zip(copies, CS, strict=True)], lr=0.3)
losses, scales = [], []
for step in range(STEPS):
    offsets = torch.stack([w.detach() for w in copies]) - (0.0 if step < MOVES else 3.0)
    losses.append((0.5 * CURVATURE * offsets.square()).sum(1))
    noise = 0.3 * torch.randn(100)
    for w, offset in zip(copies, offsets, strict=True):
        w.grad = CURVATURE * offset + noise
    optimizer.step()
    scales.append(torch.stack([scale.mean() for _, scale in optimizer.scales()]))
losses, scales = torch.stack(losses, 1), torch.stack(scales, 1)

# %%
# The smaller ``c``, the lower the noise floor. The larger ``c``, the sooner it finds the minimum after the move,
# because the statistics take a while to notice. ``c = inf`` is plain SGD. This says nothing about test data, for which
# the paper recommends a larger ``c``: a toy problem has none.


def smooth(x: torch.Tensor, window: int = 20) -> torch.Tensor:
    """The mean over a window."""
    return x.unfold(0, window, 10).mean(1)


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3))
colours = plt.colormaps["viridis"](torch.linspace(0, 0.85, len(CS)).numpy())
for c, loss, scale, colour in zip(CS, losses, scales, colours, strict=True):
    label = "c = inf: SGD" if math.isinf(c) else f"c = {c:.0f}"
    at = torch.arange(len(smooth(loss))) * 10 + 20
    left.plot(at, smooth(loss), color=colour, label=label)
    right.plot(at, smooth(scale), color=colour)
left.set(yscale="log", xlabel="steps", ylabel="loss", title="noisy descent; the minimum moves at 1,500")
right.set(xlabel="steps", ylabel="mean scale", ylim=(0, 1.05), title="mean scale")
left.legend(fontsize=8)

for c, loss in zip(CS, losses, strict=True):
    before, after = loss[MOVES - 200 : MOVES].mean(), loss[MOVES + 50]
    print(f"c = {c:<4g} before the move {before:.2f}, 50 steps after it {after:.2f}")
