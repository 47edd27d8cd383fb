"""The README's code runs as written, and its numbers are those that were measured."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks import cost_model, gains, report, summary
from PIL import Image

import cprop
from cprop_lab.output.pages import DRAWN_FROM

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


CODE = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.fixture
def quick_start():
    """The function that trains, from the README's code without its last line, which prints."""
    names = {}
    exec(compile(CODE[0].rstrip().rpartition("\n")[0], "README.md", "exec"), names)
    return names["final_loss"]


@pytest.mark.slow
def test_quick_start_prints_what_the_readme_shows(capsys):
    exec(compile(CODE[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.search(r"```text\n(.*?)```", README.read_text(), flags=re.DOTALL)[1]
    numbers = re.compile(r"Adam ([\d.]+), Adam \+ CProp ([\d.]+)\n")
    for ours, theirs in zip(numbers.fullmatch(printed).groups(), numbers.fullmatch(shown).groups(), strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=0.2)  # rounding differs between machines


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_quick_start_gains_on_other_seeds_too(quick_start, seed):
    assert quick_start(use_cprop=True, seed=seed) < 0.8 * quick_start(use_cprop=False, seed=seed)


@pytest.mark.slow
def test_quick_start_does_not_gain_where_the_readme_says_so(quick_start):
    said = re.search(r"`lr=1e-3` the losses are ([\d.]+) for Adam and ([\d.]+) with CProp", README.read_text())
    for use_cprop, loss in enumerate(said.groups()):
        assert quick_start(bool(use_cprop), lr=1e-3) == pytest.approx(float(loss), rel=0.2)


def test_the_monitor_of_the_readme_attaches_to_a_training_loop():
    attach, advise = CODE[1].split("...", 1)
    model = torch.nn.Linear(20, 2)
    names = {"cprop": cprop, "model": model, "optimizer": cprop.CProp(torch.optim.SGD(model.parameters(), lr=1e-3))}
    exec(attach, names)
    for _ in range(200):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        names["optimizer"].step()
    exec(advise.partition("\n")[2], names)
    assert len(names["monitor"].samples) == 2


@pytest.mark.slow
@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_what_the_pages_say_is_what_was_measured(page):
    """To mend it: ``python -m benchmarks.report``."""
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
        (gains.PICTURE, gains.digest, README),
        (summary.picture("scoreboard"), partial(summary.digest, "scoreboard"), README),
        (summary.picture("finalists"), partial(summary.digest, "finalists"), ROOT / "docs/results/notes/next-rule.md"),
    ],
)
def test_pictures_over_several_experiments_were_drawn_from_the_committed_runs(path, digest, page):
    """To mend it: ``python -m benchmarks.report``."""
    with Image.open(path) as picture:
        assert picture.text[DRAWN_FROM] == digest()
    assert f"images/results/{path.name}" in page.read_text()
