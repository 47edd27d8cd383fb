"""The README's code runs as written, and its numbers are those that were measured."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
README = (HERE / "README.md").read_text()
RESULTS = HERE / "benchmarks" / "results"


def test_quick_start_runs_as_written(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    accuracy, scale = map(float, re.fullmatch(r"accuracy ([\d.]+), mean scale ([\d.]+)\n", result.stdout).groups())
    assert accuracy > 0.95
    assert 0.0 < scale < 1.0


def test_the_times_are_those_measured():
    rows = {row["name"]: row for row in json.loads((RESULTS / "step.json").read_text())["rows"]}
    said = dict(re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| \d+ \|$", README, flags=re.MULTILINE))
    assert len(said) >= 4
    assert said == {name: f"{rows[name]['ratio']:.2f}" for name in said}


def test_the_curves_are_those_measured():
    report = json.loads((RESULTS / "fashion_mnist.json").read_text())
    said = re.findall(r"^\| ([a-z ]+) \| ([\d.]+) and ([\d.]+) \| ([\d.]+) \|", README, flags=re.MULTILINE)
    assert [name for name, *_ in said] == ["training loss", "test loss", "accuracy", "mean scale"]
    for name, ours, theirs, largest in said:
        key = {"training loss": "train_loss"}.get(name, name.replace(" ", "_"))
        ends = [
            statistics.mean(run[-1][key] for run in report["curves"][group])
            for group in ("jax, cprop(adam)", "torch, CProp(Adam)")
        ]
        assert [f"{end:.3f}" for end in ends] == [ours, theirs]
        assert float(largest) == max(map(abs, report["jax against torch"][key]["t"]))
