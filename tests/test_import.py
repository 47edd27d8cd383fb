"""What ``import cprop`` costs: torch, the standard library, and almost no time."""

import json
import subprocess
import sys

MODULES = """
import json, sys
import torch
before = set(sys.modules)
import cprop
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""

TIME = """
import time
import torch
start = time.perf_counter()
import cprop
print(time.perf_counter() - start)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_import_needs_torch_and_the_standard_library_alone():
    foreign = set(json.loads(run(MODULES))) - set(sys.stdlib_module_names) - {"cprop", "torch"}
    assert not foreign


def test_import_adds_less_than_300_milliseconds():
    assert min(float(run(TIME)) for _ in range(3)) < 0.3
