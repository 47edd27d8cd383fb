r"""Two parameters: one agrees, one does not
========================================

A loss with two parameters, and noise in both gradients. The first parameter is far from its minimum in a shallow
valley: its gradients are small and noisy, but they agree. The second is at its minimum in a steep valley: its gradients
are just as noisy, and cancel out.

.. math::
    f(a, b) = \tfrac12 \left(0.01\, a^2 + b^2\right)

A learning rate that gets the first parameter to its minimum is far too large for the second.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.optim import Optimizer

import cprop

CURVATURE = torch.tensor([0.01, 1.0])


def train(build: Callable[..., Optimizer], steps: int = 3000) -> tuple[Tensor, Tensor | None]:
    """Positions, and CProp's scales where there are any, step by step."""
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.tensor([30.0, 0.0]))
    optimizer = build([w])
    positions, scales = [], []
    for _ in range(steps):
        w.grad = CURVATURE * w.detach() + 0.5 * torch.randn(2, generator=generator)
        optimizer.step()
        positions.append(w.detach().clone())
        if isinstance(optimizer, cprop.CPropSGD):
            scales.extend(scale for _, scale in optimizer.scales())
    return torch.stack(positions), torch.stack(scales) if scales else None


plain, _ = train(lambda params: torch.optim.SGD(params, lr=0.5))
scaled, scales = train(lambda params: cprop.CPropSGD(params, lr=0.5))

# %%
# With and without CProp, the first parameter arrives equally fast, because its scale is one while its gradients agree.
# The second moves less with CProp: its steps have shrunk. Once the first has arrived, its gradients begin to cancel out
# as well, and its scale falls too, without anyone telling CProp when.

figure, axes = plt.subplots(1, 3, figsize=(9, 3))
for ax, i, name in ((axes[0], 0, "a: far away"), (axes[1], 1, "b: at its minimum")):
    ax.plot(plain[:, i], linewidth=0.8, label="SGD")
    ax.plot(scaled[:, i], linewidth=0.8, label="CPropSGD")
    ax.set(title=name, xlabel="steps")
axes[0].set_ylabel("position")
axes[0].legend()
axes[2].plot(scales[:, 0], color="0.2", label="a")
axes[2].plot(scales[:, 1], color="0.6", label="b")
axes[2].set(title="scales", xlabel="steps", ylim=(0, 1.05))
axes[2].legend()

for name, run in (("SGD", plain), ("CPropSGD", scaled)):
    a, b = run[2000:].std(0)
    print(f"{name:9} over the last 1,000 steps: deviation of a {a:.2f}, of b {b:.2f}")
