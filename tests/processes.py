"""Real processes: fresh ones, and for the distributed tests several that connect over loopback with gloo."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Where torch builds C++ extensions: one folder per test run, shared by its workers. In the user's own cache, a process
# killed while building leaves a lock that every later start waits for.
EXTENSIONS = Path(tempfile.gettempdir()) / f"extensions-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"


FSDP2 = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 runs on a CPU: it calls this method, which torch 2.6 does not have."""
needs_fsdp2 = pytest.mark.skipif(not FSDP2, reason="torch's FSDP2 does not run on a CPU in this release")

# Importing torch takes most of the time of such a test. So processes are forked from one that has only imported these
# modules.
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._inductor.compile_fx", "table")


def spawn(case, world, folder, *arguments):
    """Run ``case(rank, world, folder, *arguments)`` in ``world`` processes, and fail if one fails."""
    with tempfile.TemporaryDirectory() as meeting:
        elsewhere(_join, case, world, f"file://{meeting}/store", str(folder), arguments, processes=world)


def elsewhere(function, *arguments, processes=1):
    """Run ``function(rank, *arguments)`` in fresh processes, and fail if one fails."""
    mp.set_forkserver_preload(list(IMPORTED))
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the process that is forked from
        mp.start_processes(_alone, (function, *arguments), nprocs=processes, start_method="forkserver")


def torchrun(*command, **environment):
    """Run a script in two processes from the project's root, as a user would, and return its output."""
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
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _alone(rank, function, *arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    function(rank, *arguments)


def _join(rank, case, world, meeting, folder, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Rendezvous through a file instead of a port, which another test might use.
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        case(rank, world, folder, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
