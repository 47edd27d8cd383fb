"""Data-parallel training with one checkpoint file, from which any number of processes can resume.

torchrun --nproc-per-node 2 examples/ddp.py runs/ddp.pt
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cprop
from cprop import checkpoint_files


def main() -> None:
    """Train a classifier of points in the plane."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint file; if it exists, training resumes from it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    # CProp is element-wise: all ranks have the same gradients, and so the same scales.
    optimizer = cprop.CProp(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    done = 0
    if arguments.checkpoint.exists():
        saved = checkpoint_files.load(arguments.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    if rank == 0:
        print(f"{f'resumed from step {done}' if done else 'starting at step 0'} on {world} processes", flush=True)
    parallel = DistributedDataParallel(model)
    for step in range(done, arguments.steps):
        # The global batch of a step does not depend on the number of ranks; each takes its part.
        points = torch.randn(64, 2, generator=torch.Generator().manual_seed(step))[rank::world]
        labels = (points.norm(dim=1) < 1.2).long()
        loss = nn.functional.cross_entropy(parallel(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % arguments.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            checkpoint_files.save(state, arguments.checkpoint)
            print(f"step {step + 1}: loss {loss.item():.3f}, checkpoint saved", flush=True)
    points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(-1))
    accuracy = (model(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean()
    if rank == 0:
        print(f"finished {arguments.steps} steps: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
