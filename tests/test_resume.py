"""Train, save, load in a fresh process, train on: the same as without a break, to the bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from table import TABLE, inputs, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALF, WHOLE = 50, 100

RESUME = """
import sys, torch
from table import TABLE, inputs, train
from test_resume import DTYPES, HALF, WHOLE, case_file
folder = sys.argv[1]
for entry in TABLE:
    for name, dtype in DTYPES.items():
        saved = torch.load(case_file(folder, entry, name), weights_only=True)
        params = inputs(dtype)
        optimizer = entry.build(params)
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for p, value in zip(params, saved["params"], strict=True):
                p.copy_(value)
        train(optimizer, params, WHOLE - HALF, start=HALF)
        torch.save([p.detach() for p in params], case_file(folder, entry, name) + ".resumed")
"""


def case_file(folder, entry, dtype):
    return str(Path(folder) / f"{TABLE.index(entry)}-{dtype}.pt")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Every case trained to the half, and the second half trained by another process."""
    folder = tmp_path_factory.mktemp("resume")
    for entry in TABLE:
        for name, dtype in DTYPES.items():
            params = inputs(dtype)
            optimizer = entry.build(params)
            train(optimizer, params, HALF)
            torch.save(
                {"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]},
                case_file(folder, entry, name),
            )
    subprocess.run([sys.executable, "-c", RESUME, str(folder)], check=True, cwd=Path(__file__).parent, timeout=240)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)
def test_resumed_in_a_fresh_process_equals_unbroken(entry, dtype, resumed):
    params = inputs(DTYPES[dtype])
    train(entry.build(params), params, WHOLE)
    after = torch.load(case_file(resumed, entry, dtype) + ".resumed", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(params, after, strict=True))
