"""Every example runs as its first lines say."""

import re

import pytest
from processes import torchrun


def test_ddp_and_its_resumption(tmp_path):
    checkpoint = tmp_path / "ddp.pt"
    torchrun("examples/ddp.py", checkpoint, "--steps", 100)
    printed = torchrun("examples/ddp.py", checkpoint)
    start, accuracy = re.search(r"from step (\d+) to 200 on 2 processes: accuracy ([\d.]+)", printed).groups()
    assert int(start) == 100
    assert float(accuracy) > 0.95


def test_deepspeed():
    pytest.importorskip("deepspeed", exc_type=ImportError)
    printed = torchrun("examples/deepspeed_zero.py", "--stage", 2, DS_ACCELERATOR="cpu")
    assert float(re.search(r"ZeRO 2 on 2 processes: accuracy ([\d.]+)", printed)[1]) > 0.95


def test_fsdp2(tmp_path):
    torchrun("examples/fsdp2_dcp.py", tmp_path, "--steps", 6, "--every", 3, "--fused")
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "step-00000003", "step-00000006"}
