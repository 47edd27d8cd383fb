"""The README's code runs as written, and its numbers are those that were measured."""

import itertools
import re
from pathlib import Path

import pytest
import torch

import cprop

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


WRAP, EXAMPLE = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.fixture
def final_losses():
    """The function that trains, from the README's example without what prints."""
    names = {}
    exec(compile(EXAMPLE.partition("\nprint(")[0], "README.md", "exec"), names)
    return names["final_losses"]


def test_the_lines_to_add_work():
    names = {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)}
    exec(WRAP, names)
    assert isinstance(names["optimizer"], cprop.CProp)


@pytest.mark.slow
def test_the_example_prints_what_the_readme_shows(capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.search(r"```text\n(.*?)```", README.read_text(), flags=re.DOTALL)[1]
    number = re.compile(r"\d\.\d{3}")
    assert number.sub("", printed) == number.sub("", shown)
    for ours, theirs in zip(number.findall(printed), number.findall(shown), strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=0.2)  # rounding differs between machines


@pytest.mark.slow
def test_what_the_readme_says_of_its_example_holds_for_another_seed_too(final_losses):
    """CProp helps at a constant rate; averaged weights and a decay do more, and with them, CProp hurts."""
    found = {kind: final_losses(*kind, seed=1) for kind in itertools.product((False, True), repeat=2)}
    (adam, adam_averaged), (ours, ours_averaged) = found[False, False], found[True, False]
    (adam_decayed, _), (ours_decayed, _) = found[False, True], found[True, True]
    assert ours < 0.8 * adam
    assert max(adam_averaged, adam_decayed) < 0.9 * ours
    assert adam_averaged < ours_averaged
    assert adam_decayed < ours_decayed


@pytest.mark.slow
def test_the_example_does_not_gain_where_the_readme_says_so(final_losses):
    said = re.search(r"`lr=1e-3` the losses are ([\d.]+) for Adam and ([\d.]+) with CProp", README.read_text())
    for page in ("settings.md", "results/when-to-use.md"):
        assert all(loss in (ROOT / "docs" / page).read_text() for loss in said.groups())
    for use_cprop, loss in enumerate(said.groups()):
        assert final_losses(bool(use_cprop), decay=False, lr=1e-3)[0] == pytest.approx(float(loss), rel=0.2)
