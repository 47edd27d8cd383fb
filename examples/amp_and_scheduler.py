"""Plain PyTorch with mixed precision, gradient clipping, a scheduler, and a monitor that shows what CProp does.

python examples/amp_and_scheduler.py
"""

import argparse

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import cprop
from cprop.integrations import terminal


def main() -> None:
    """Train a classifier of points in the plane."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = cprop.CProp(torch.optim.AdamW(model.parameters(), lr=3e-3))  # the only line that changes
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=50)
    scaler = torch.amp.GradScaler(device)
    monitor = cprop.Monitor(optimizer, model.named_parameters(), every=100, batch_size=64)
    for step in range(arguments.steps):
        points = torch.randn(64, 2, device=device)
        labels = (points.norm(dim=1) < 1.2).long()
        with torch.autocast(device, dtype):
            loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        # CProp must see the true gradients: call unscale_ before anything reads them, as for clipping.
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        warmup.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {arguments.steps}: loss {loss.item():.3f}")
    points = torch.randn(4096, 2, device=device)
    accuracy = (model(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean()
    Console().print(terminal.table(monitor))
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
