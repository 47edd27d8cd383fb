"""The README's code runs as written, and its numbers are those that were measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import cost_model, report

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_quick_start_runs_as_written(tmp_path):
    code, look = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    # The second block is attached to the first one's optimizer, before it trains.
    attach, rest = look.split("...", 1)
    code = code.replace("for step in range", attach + "for step in range") + rest.partition("\n")[2]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    accuracy, scale = map(float, re.match(r"accuracy ([\d.]+), mean scale ([\d.]+)\n", result.stdout).groups())
    assert accuracy > 0.95
    assert 0.0 < scale < 1.0


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_what_the_pages_say_is_what_was_measured(page):
    """To mend it: ``python -m benchmarks.report``."""
    text = page.read_text()
    assert re.search("<!-- (measured|fact): ", text)
    assert report.filled(text) == text


def test_the_cost_model_is_a_floor_and_of_the_right_size():
    """Measured times are above what the bytes predict, and by less than twice; the machine's noise aside."""
    times = {name: row["25M"] for name, row in report.ratios().items() if "25M" in row}
    for name, predicted, measured in cost_model.check(times)[1:]:
        assert 0.9 * predicted < measured < 2.0 * predicted, name
