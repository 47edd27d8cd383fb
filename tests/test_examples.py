"""Every example runs as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import torchrun

pytestmark = pytest.mark.slow


def test_ddp_and_its_resumption(tmp_path):
    checkpoint = tmp_path / "ddp.pt"
    torchrun("examples/ddp.py", checkpoint, "--steps", 100)
    printed = torchrun("examples/ddp.py", checkpoint)
    assert "resumed from step 100 on 2 processes" in printed
    assert float(re.search(r"finished 200 steps: accuracy ([\d.]+)", printed)[1]) > 0.95


def test_deepspeed():
    pytest.importorskip("deepspeed", exc_type=ImportError)
    printed = torchrun("examples/deepspeed_zero.py", "--stage", 2, DS_ACCELERATOR="cpu")
    assert printed.count("the first time, it compiles its extensions") == 1
    assert float(re.search(r"ZeRO 2 on 2 processes: accuracy ([\d.]+)", printed)[1]) > 0.95


def test_fsdp2(tmp_path):
    torchrun("examples/fsdp2_dcp.py", tmp_path, "--steps", 3, "--every", 3)
    printed = torchrun("examples/fsdp2_dcp.py", tmp_path, "--steps", 6, "--every", 3, "--fused")
    assert printed.count("resumed from step 3 on 2 processes") == 1
    assert re.search(r"step 6 of 6: loss [\d.]+\nsaved step-00000006\nfinished 6 steps", printed)
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "step-00000003", "step-00000006"}


def python(*command):
    """Run an example as a user would, from the project's root, and give back what it printed."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_amp_and_scheduler():
    printed = python("examples/amp_and_scheduler.py")
    assert "CProp, step 600" in printed
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.98


def test_transformers_and_its_resumption(tmp_path):
    python("examples/transformers_trainer.py", tmp_path / "resumed", "--steps", 20)
    resumed = python("examples/transformers_trainer.py", tmp_path / "resumed")
    by_class = python("examples/transformers_trainer.py", tmp_path / "by-class", "--by-class")
    ends = r"from (\S+|the start) to step 40: loss [\d.]+ to ([\d.]+), mean scale ([\d.]+)"
    assert re.search(ends, resumed)[1] == "checkpoint-20"
    # Both ways of passing it, resumed or not: the same training, but for the order of sums.
    for one, other in zip(re.search(ends, resumed).groups()[1:], re.search(ends, by_class).groups()[1:], strict=True):
        assert float(one) == pytest.approx(float(other), abs=0.005)


def test_lightning_resumes_to_the_bit(tmp_path):
    assert "bitwise identical: True" in python("examples/lightning_resume.py", tmp_path)
    (metrics, *_) = tmp_path.glob("whole/lightning_logs/*/metrics.csv")
    assert "cprop/network.0/noise_scale" in metrics.read_text()


def test_accelerate_and_its_resumption(tmp_path):
    assert "128 optimizer steps in total" in python("examples/accelerate_loop.py", tmp_path / "state")
    printed = python("examples/accelerate_loop.py", tmp_path / "state")
    assert f"resumed from {tmp_path / 'state'}" in printed
    assert float(re.search(r"256 optimizer steps in total: accuracy ([\d.]+)", printed)[1]) > 0.97
