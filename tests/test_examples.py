"""Every example runs as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **environment):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*torchrun, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.xdist_group("distributed")
def test_ddp_and_its_resumption(tmp_path):
    checkpoint = tmp_path / "ddp.pt"
    run("examples/ddp.py", checkpoint, "--steps", 100)
    printed = run("examples/ddp.py", checkpoint)
    start, accuracy = re.search(r"from step (\d+) to 200 on 2 processes: accuracy ([\d.]+)", printed).groups()
    assert int(start) == 100
    assert float(accuracy) > 0.95


@pytest.mark.xdist_group("distributed")
def test_deepspeed():
    pytest.importorskip("deepspeed", exc_type=ImportError)
    printed = run("examples/deepspeed_zero.py", "--stage", 2, DS_ACCELERATOR="cpu")
    assert float(re.search(r"ZeRO 2 on 2 processes: accuracy ([\d.]+)", printed)[1]) > 0.95


@pytest.mark.xdist_group("distributed")
def test_fsdp2(tmp_path):
    run("examples/fsdp2_dcp.py", tmp_path, "--steps", 6, "--every", 3, "--fused")
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "step-00000003", "step-00000006"}
