"""What ``import cprop`` costs: torch, the standard library, and almost no time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import cprop
seconds = time.process_time() - start
print(json.dumps([seconds, *sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


USER = """
import torch
import cprop

model = torch.nn.Linear(4, 1)
around = cprop.CProp.around(torch.optim.AdamW)
adam = cprop.CPropAdam(model.parameters(), betas=(torch.tensor(0.9), torch.tensor(0.999)))
optimizers: list[torch.optim.Optimizer] = [
    cprop.CProp(torch.optim.Adam(model.parameters()), c=2.0),
    around(model.parameters(), lr=1e-3, cprop_c=2.0),
    adam,
    cprop.CPropAdamW([{"params": [model.weight], "lr": 0.1}], lr=torch.tensor(1e-3)),
]
loss: float = adam.step(lambda: 0.0)
adam.step()
wrapped: cprop.CProp = around(model.parameters())
loss = wrapped.step(lambda: 0.0)
cprop.CProp(torch.optim.Adam(model.parameters()), foo=1)  # wrong
cprop.CPropAdam(model.parameters(), foo=1)  # wrong
around(1.0)  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_accepts_what_the_documentation_shows_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    root = Path(__file__).parents[1]  # for its cache, in which torch is checked already
    (tmp_path / "user.py").write_text(USER)
    code = [sys.executable, "-m", "mypy", str(tmp_path / "user.py")]
    run = subprocess.run(code, capture_output=True, text=True, timeout=900, cwd=root)
    wrong = [number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]
    found = [int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error: " in line]
    assert found == wrong, run.stdout + run.stderr


@pytest.mark.slow
def test_import_needs_torch_and_the_standard_library_alone_and_less_than_300_milliseconds():
    for _ in range(3):  # the first may find its files not yet in memory
        run = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True, timeout=500)
        seconds, *modules = json.loads(run.stdout)
        assert not set(modules) - set(sys.stdlib_module_names) - {"cprop", "torch"}
        if seconds < 0.3:
            return
    pytest.fail(f"import cprop takes {seconds:.2f} s")
