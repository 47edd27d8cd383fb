"""CProp inside the backward pass: each parameter is updated as soon as its gradient is complete, which is then freed.

    python examples/optimizer_in_backward.py              # one optimizer per parameter, in backward
    python examples/optimizer_in_backward.py --after      # one optimizer, after backward

Both print the same loss. The first needs less memory, by nearly all gradients, which do not exist at the same time.
The price: no clipping by the norm of all gradients, no accumulation over batches, and no ``GradScaler``.
"""

import argparse

import torch
from torch import Tensor, nn

import cprop

LAYERS, WIDTH = 48, 256


def step_in_backward(model: nn.Module, **settings: float) -> dict[str, torch.optim.Optimizer]:
    """Give each parameter an optimizer that steps as soon as the parameter's gradient is complete.

    Returns:
        The optimizers by parameter name, for schedulers and checkpoints.
    """
    optimizers = {}
    for name, p in model.named_parameters():
        optimizer = optimizers[name] = cprop.CPropAdamW([p], **settings)

        def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    return optimizers


def watch_gradients(model: nn.Module) -> list[int]:
    """The bytes of all gradients that exist, whenever one is complete. Call it before the optimizers are built.

    It counts tensors because the memory of a process on a CPU depends on its allocator more than on them.
    """
    held: list[int] = []

    def count(_: Tensor) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        held.append(sum(g.numel() * g.element_size() for g in gradients))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    return held


def main() -> None:
    """Train for a few steps, and print the final loss and the most memory that gradients took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--after", action="store_true", help="step after backward, as usual")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    held = watch_gradients(model)
    usual = cprop.CPropAdamW(model.parameters(), lr=1e-4) if options.after else None
    if usual is None:
        step_in_backward(model, lr=1e-4)
    inputs = torch.randn(64, WIDTH)
    targets = inputs[:, :1].sign()
    for _ in range(options.steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if usual is not None:
            usual.step()
            usual.zero_grad()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"loss {loss.item():.9f}, gradients at once {max(held) / 2**20:.2f} MiB, weights {weights / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
