"""Pages and figures say what was measured."""

import re
from functools import partial

import pytest
from evidence import ROOT, cost_model, gains, report, summary
from evidence.pages import DRAWN_FROM
from PIL import Image

README = ROOT / "README.md"


@pytest.mark.slow
@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_what_the_pages_say_is_what_was_measured(page):
    """To mend it: ``python -m evidence.report``."""
    text = page.read_text()
    assert re.search("<!-- measured: ", text)
    assert report.filled(text) == text


def test_the_cost_model_is_a_floor_and_of_the_right_size():
    """Measured times are above what the bytes predict, and by less than twice; the machine's noise aside."""
    times = {name: row["25M"] for name, row in report.ratios().items() if "25M" in row}
    for name, predicted, measured in cost_model.check(times)[1:]:
        assert 0.9 * predicted < measured < 2.0 * predicted, name


@pytest.mark.parametrize(
    ("path", "digest", "page"),
    [
        (gains.PICTURE, gains.digest, ROOT / "docs/results/index.md"),
        (summary.picture("scoreboard"), partial(summary.digest, "scoreboard"), README),
        (summary.picture("finalists"), partial(summary.digest, "finalists"), ROOT / "docs/results/notes/next-rule.md"),
    ],
)
def test_pictures_over_several_experiments_were_drawn_from_the_committed_runs(path, digest, page):
    """To mend it: ``python -m evidence.report``."""
    with Image.open(path) as picture:
        assert picture.text[DRAWN_FROM] == digest()
    assert f"images/results/{path.name}" in page.read_text()
