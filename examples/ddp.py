"""Data-parallel training, with one checkpoint file that any number of processes goes on from.

torchrun --nproc-per-node 2 examples/ddp.py runs/ddp.pt
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cprop
from cprop import files


def main() -> None:
    """Train a classifier of points in the plane."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="file to write, and to go on from if it is there")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    # CProp is element-wise: every rank has the same gradients and so the same scales.
    optimizer = cprop.CProp(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    done = 0
    if arguments.checkpoint.exists():
        saved = files.load(arguments.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    parallel = DistributedDataParallel(model)
    for step in range(done, arguments.steps):
        # The batch of a step is the same however many ranks there are; each takes its part.
        points = torch.randn(64, 2, generator=torch.Generator().manual_seed(step))[rank::world]
        labels = (points.norm(dim=1) < 1.2).long()
        loss = nn.functional.cross_entropy(parallel(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % arguments.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            files.save(state, arguments.checkpoint)
    points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(-1))
    accuracy = (model(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean()
    if rank == 0:
        print(f"from step {done} to {arguments.steps} on {world} processes: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
