"""The README's code runs as written."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


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
