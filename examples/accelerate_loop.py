"""Accelerate with CProp: gradient accumulation, clipping and a saved state.

accelerate launch --cpu examples/accelerate_loop.py runs/accelerate
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cprop


def main() -> None:
    """Train a classifier of points in the plane, or resume."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the saved state; if it exists, training resumes from it")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    points = torch.randn(2048, 2)
    labels = (points.norm(dim=1) < 1.2).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    # Wrap the plain optimizer before prepare(): Accelerate then wraps CProp as it would wrap Adam.
    optimizer = cprop.CProp(torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if arguments.folder.exists():
        accelerator.load_state(arguments.folder)
        accelerator.print(f"resumed from {arguments.folder}")
    for epoch in range(arguments.epochs):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1} of {arguments.epochs}: loss {loss.item():.3f}")
    accelerator.save_state(arguments.folder)
    with torch.no_grad():
        accuracy = (model(points.to(accelerator.device)).argmax(1).cpu() == labels).float().mean()
    steps = next(iter(optimizer.optimizer.state.values()))["cprop_step"]
    accelerator.print(
        f"{int(steps)} optimizer steps in total: accuracy {accuracy:.3f}; state saved to {arguments.folder}"
    )


if __name__ == "__main__":
    main()
