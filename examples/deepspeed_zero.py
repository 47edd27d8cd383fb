"""CProp under DeepSpeed's ZeRO, stages 1 to 3.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 2

ZeRO gives the optimizer flat one-dimensional shards of the parameters, which is all an element-wise
rule needs. (On GPUs, omit DS_ACCELERATOR and launch it with ``deepspeed``.)
"""

import argparse
import os

import deepspeed
import torch
from torch import nn

import cprop


def main() -> None:
    """Train a classifier of points in the plane."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if os.environ.get("RANK", "0") == "0":
        print("starting DeepSpeed; the first time, it compiles its extensions, which may take a minute", flush=True)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    config = {
        "train_batch_size": 64,
        "zero_optimization": {"stage": arguments.stage},
        "zero_allow_untested_optimizer": True,  # DeepSpeed only knows its own list of optimizers
    }
    optimizer = cprop.CPropAdam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(arguments.steps):
        points = torch.randn(64, 2, generator=torch.Generator().manual_seed(step))[rank::world]
        labels = (points.norm(dim=1) < 1.2).long()
        loss = nn.functional.cross_entropy(engine(points), labels)
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1} of {arguments.steps}: loss {loss.item():.3f}", flush=True)
    points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(-1))
    accuracy = (engine(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean()
    if rank == 0:
        print(f"ZeRO {arguments.stage} on {world} processes: accuracy {accuracy:.3f}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
