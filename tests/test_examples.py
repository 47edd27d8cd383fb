"""Every example runs as its first lines say."""

import json
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


@pytest.mark.nightly  # test_deepspeed.py trains with it; this takes two minutes, for extensions that it compiles
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


RUNS = """
import json, runpy, sys
script, *runs = json.loads(sys.argv[1])
for arguments in runs:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


def python(script, *runs):
    """Run an example from the project's root, once for each list of arguments, and return its output.

    All in one process: importing a framework takes longer than the example.
    """
    command = [script, *([str(word) for word in arguments] for arguments in runs or [()])]
    result = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(command)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_amp_and_scheduler():
    printed = python("examples/amp_and_scheduler.py")
    assert "CProp, step 600" in printed
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.98


def test_transformers_and_its_resumption(tmp_path):
    folder, other = tmp_path / "resumed", tmp_path / "by-class"
    printed = python("examples/transformers_trainer.py", (folder, "--steps", 20), (folder,), (other, "--by-class"))
    ends = r"from (\S+|the start) to step 40: loss [\d.]+ to ([\d.]+), mean scale ([\d.]+)"
    (start, *resumed), (_, *by_class) = re.findall(ends, printed)
    assert start == "checkpoint-20"
    # Both ways of passing it, resumed or not: the same training, but for the order of sums.
    assert list(map(float, resumed)) == pytest.approx(list(map(float, by_class)), abs=0.005)


def test_lightning_resumes_to_the_bit(tmp_path):
    assert "bitwise identical: True" in python("examples/lightning_resume.py", (tmp_path,))
    (metrics, *_) = tmp_path.glob("whole/lightning_logs/*/metrics.csv")
    assert "cprop/network.0/noise_scale" in metrics.read_text()


def test_optimizer_in_backward_saves_the_memory_of_the_gradients():
    printed = python("examples/optimizer_in_backward.py", (), ("--after",))
    line = r"loss ([\d.]+), gradients at once ([\d.]+) MiB, weights ([\d.]+) MiB"
    (loss, in_backward, _), (same, after, weights) = re.findall(line, printed)
    assert loss == same
    assert after == weights
    assert float(in_backward) < 0.03 * float(weights)  # one layer of 49


def test_accelerate_and_its_resumption(tmp_path):
    folder = tmp_path / "state"
    first, _, second = python("examples/accelerate_loop.py", (folder,), (folder,)).partition(f"resumed from {folder}")
    assert "128 optimizer steps in total" in first
    assert float(re.search(r"256 optimizer steps in total: accuracy ([\d.]+)", second)[1]) > 0.97
