"""Real processes for the distributed tests: gloo on loopback, several cases in one start."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Where torch builds C++ extensions: one folder a test run, shared by its workers. In the user's own cache a process
# that was killed while building leaves a lock behind, for which every later start waits without end.
EXTENSIONS = Path(tempfile.gettempdir()) / f"extensions-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"


def spawn(case, world, folder, *arguments):
    """Run ``case(rank, world, folder, *arguments)`` in as many processes, and fail if one fails."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_run, (case, world, f"file://{meeting}/store", str(folder), arguments), nprocs=world)


def torchrun(*command, **environment):
    """Run a script in two processes as a user would, from the project's root, and give back what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
