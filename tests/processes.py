"""Real processes for the distributed tests: gloo on loopback, several cases in one start."""

import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(case, world, folder, *arguments):
    """Run ``case(rank, world, folder, *arguments)`` in as many processes, and fail if one fails."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_run, (case, world, f"file://{meeting}/store", str(folder), arguments), nprocs=world)


def _run(rank, case, world, meeting, folder, arguments):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # They meet at a file and not at a port: ports are taken by other tests, files are not.
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        case(rank, world, folder, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
