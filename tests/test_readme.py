"""The README's code runs as written, and its numbers are those that were measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_quick_start_runs_as_written(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    accuracy, scale = map(float, re.fullmatch(r"accuracy ([\d.]+), mean scale ([\d.]+)\n", result.stdout).groups())
    assert accuracy > 0.95
    assert 0.0 < scale < 1.0


def test_what_the_readme_says_of_the_step_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text())["rows"]
    measured = {row["name"]: row["ratio"] for row in rows if row["shape"] == "25M"}
    limit, fused = re.search(
        r"takes ([\d.]+) times fused Adam, which is the limit; the fused step is at ([\d.]+)",
        " ".join(README.read_text().split()),
    ).groups()
    assert limit == f"{measured['bare loop, the bytes of CPropAdam']:.1f}"
    assert fused == f"{measured['CPropAdam, fused']:.1f}"
