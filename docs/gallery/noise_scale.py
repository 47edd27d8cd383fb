r"""The gradient noise scale, against a known answer
================================================

For linear regression the noise scale can be written down. With inputs :math:`x \sim \mathcal N(0, I)` in :math:`d`
dimensions, targets :math:`y = w^* \cdot x + \varepsilon` with noise of variance :math:`\rho^2`, and
:math:`\delta = w - w^*`, the mean gradient of the halved squared error is :math:`\delta`, and

.. math::
    B_{\text{simple}} = \frac{\operatorname{tr} \Sigma}{|G|^2}
                      = \frac{(d + 1)\, |\delta|^2 + d \rho^2}{|\delta|^2}

How close does the monitor come? It sees one batch per step, and never two batch sizes.
"""

import matplotlib.pyplot as plt
import torch

import cprop
from cprop.diagnostics.summary import Sample

D, NOISE = 50, 2.0


def truth(delta: torch.Tensor) -> float:
    """The noise scale by the formula."""
    squared = delta.square().sum().item()
    return ((D + 1) * squared + D * NOISE**2) / squared


def watch(batch_size: int, lr: float, steps: int, every: int, beta: float = 0.999) -> list[tuple[Sample, float]]:
    """Pairs of samples and true noise scales."""
    generator = torch.Generator().manual_seed(batch_size)
    w = torch.nn.Parameter(torch.full((D,), 0.3))  # the true weights are zero: delta is w
    optimizer = cprop.CPropSGD([w], lr=lr, cprop_beta=beta)
    monitor = cprop.Monitor(optimizer, every=every, batch_size=batch_size)
    seen = []
    for _ in range(steps):
        x = torch.randn(batch_size, D, generator=generator)
        residual = x @ w.detach() - NOISE * torch.randn(batch_size, generator=generator)
        w.grad = x.T @ residual / batch_size
        true = truth(w.detach())
        optimizer.step()
        if len(monitor.samples) > len(seen):
            seen.append((monitor.samples[-1], true))
    return seen


# %%
# First with learning rate zero: the weights do not move, there is one answer, and every batch size should give it.

sizes = [2, 8, 32, 128, 512]
at_rest = [watch(size, lr=0.0, steps=1500, every=1500)[0] for size in sizes]
estimates = [sample.total.noise_scale(size) for (sample, _), size in zip(at_rest, sizes, strict=True)]
for size, estimate in zip(sizes, estimates, strict=True):
    print(f"batches of {size:3}: {estimate:6.1f}, true {at_rest[0][1]:.1f}")

# %%
# Then while learning: the signal shrinks, and the true noise scale grows. The estimate covers the whole horizon, so it
# lags behind the current value: it is too low here, where the signal falls quickly. A shorter horizon follows faster
# but is less certain. The shaded area is one standard error of the signal.

learning = {beta: watch(32, lr=2e-3, steps=2500, every=50, beta=beta) for beta in (0.999, 0.99)}

figure, (left, right) = plt.subplots(1, 2)
for size, (sample, _), estimate in zip(sizes, at_rest, estimates, strict=True):
    error = estimate * sample.total.signal_error / sample.total.signal
    left.errorbar(size, estimate, yerr=error, fmt="o", color="C0", capsize=3)
left.axhline(at_rest[0][1], color="0.3", linestyle=":", label="by the formula")
left.set(xscale="log", xlabel="batch size", ylabel="noise scale, examples", ylim=(0, 180), title="at rest")
left.legend(loc="lower right")

steps = [sample.step for sample, _ in learning[0.999]]
right.plot(steps, [true for _, true in learning[0.999]], color="0.3", linestyle=":", label="by the formula")
for beta, seen in learning.items():
    totals = [sample.total for sample, _ in seen]
    (line,) = right.plot(steps, [total.noise_scale(32) for total in totals], label=f"estimate, beta = {beta}")
    low = [32 * total.noise / (max(total.signal, 0.0) + total.signal_error) for total in totals]
    high = [32 * total.noise / max(total.signal - total.signal_error, 1e-9) for total in totals]
    right.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
right.set(yscale="log", xlabel="steps", ylim=(50, 1e5), title="while learning, batches of 32")
right.legend(loc="lower right")
