"""Train, save, load in a fresh process, train on: the same as without a break, to the bit."""

import pytest
import torch
from processes import elsewhere
from table import TABLE, inputs, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALF, WHOLE = 50, 100
ENTRIES = {entry.id: entry for entry in TABLE}


def resume(rank, name, folder):
    """The second half, in a process that knows nothing of the first."""
    for dtype in DTYPES:
        saved = torch.load(folder / f"{dtype}.pt", weights_only=True)
        params = inputs(DTYPES[dtype])
        optimizer = ENTRIES[name].build(params)
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for p, value in zip(params, saved["params"], strict=True):
                p.copy_(value)
        train(optimizer, params, WHOLE - HALF, start=HALF)
        torch.save([p.detach() for p in params], folder / f"{dtype}-resumed.pt")


@pytest.mark.parametrize("name", ENTRIES)
def test_resumed_in_a_fresh_process_equals_unbroken(name, tmp_path):
    unbroken = {}
    for dtype in DTYPES:
        params = inputs(DTYPES[dtype])
        optimizer = ENTRIES[name].build(params)
        train(optimizer, params, HALF)
        half = {"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}
        torch.save(half, tmp_path / f"{dtype}.pt")
        train(optimizer, params, WHOLE - HALF, start=HALF)
        unbroken[dtype] = params
    elsewhere(resume, name, tmp_path)
    for dtype in DTYPES:
        after = torch.load(tmp_path / f"{dtype}-resumed.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(unbroken[dtype], after, strict=True)), dtype
