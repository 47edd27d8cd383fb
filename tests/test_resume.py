"""Train, save, load in a fresh process, train on: the same as without a break, to the bit."""

import pytest
import torch
from processes import elsewhere
from table import TABLE, inputs, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALF, WHOLE = 10, 20
ENTRIES = {entry.id: entry for entry in TABLE}
CASES = [(name, dtype) for name in ENTRIES for dtype in DTYPES]


def begin(name, dtype):
    params = inputs(DTYPES[dtype])
    return ENTRIES[name].build(params), params


def resume(rank, folder):
    """The second half, in a process that knows nothing of the first."""
    for i, case in enumerate(CASES):
        optimizer, params = begin(*case)
        saved = torch.load(folder / f"{i}.pt", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for p, value in zip(params, saved["params"], strict=True):
                p.copy_(value)
        train(optimizer, params, WHOLE - HALF, start=HALF)
        torch.save([p.detach() for p in params], folder / f"{i}-resumed.pt")


@pytest.mark.slow
def test_resumed_in_a_fresh_process_equals_unbroken(tmp_path):
    unbroken = []
    for i, case in enumerate(CASES):
        optimizer, params = begin(*case)
        train(optimizer, params, HALF)
        torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, tmp_path / f"{i}.pt")
        unbroken.append(train(optimizer, params, WHOLE - HALF, start=HALF))
    elsewhere(resume, tmp_path)  # once for all of them: it takes longer to start than they do
    for i, (case, params) in enumerate(zip(CASES, unbroken, strict=True)):
        resumed = torch.load(tmp_path / f"{i}-resumed.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True)), case
