"""The README's code runs as written, and its numbers are those that were measured."""

import re
from pathlib import Path

import pytest
import torch

import cprop

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
