"""The documentation site: its pages are found, their code runs, and what they say can be counted is counted.

That the site builds without a warning is a step of ``.ci/run``.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch.nn import Parameter

import cprop
from cprop.diagnostics.advice import LEAST_FRACTION, PATIENCE, SURE
from cprop.diagnostics.monitor import KEPT

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md") if "_build" not in path.parts]
LION = ROOT / "examples" / "cprop_lion.py"


def toctree(page):
    """The pages that a page lists."""
    folder = Path(page).parent
    for block in re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            if line and not line.startswith(":"):
                yield (folder / line).as_posix()


def test_every_page_is_found_from_the_first():
    lists = ("index", "api/index", "results/index", "results/notes/index")
    found = {"index", *(page for one in lists for page in toctree(one))}
    assert set(PAGES) == found - {"auto_gallery/index"}


def test_links_between_pages_work_in_the_repository_too():
    for page in PAGES:
        path = DOCS / f"{page}.md"
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith(("http", "auto_gallery/", "drawn/")):
                assert (path.parent / target).exists(), f"{page}: {target}"


def test_what_the_paper_says_is_labelled_as_its_claim():
    """So that nobody takes it for what was measured."""
    quotes = {page: re.findall(r"(?m)(?:^>.*\n)+", (DOCS / f"{page}.md").read_text()) for page in PAGES}
    of_results = [quote for page, own in quotes.items() if page.startswith("results/") for quote in own]
    assert len(of_results) > 10
    for quote in of_results:
        assert quote.startswith("> **The paper's claim:** \""), quote


WITH_CODE = ("migration", "trainers", "settings", "how-it-works", "diagnostics", "internals", "related")


def test_no_new_page_with_code_is_forgotten():
    """The page on tasks is run by the laboratory's tests."""
    assert {page for page in PAGES if "```python\n" in (DOCS / f"{page}.md").read_text()} == {*WITH_CODE, "own-task"}


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), names)


def test_the_front_page_starts_with_the_first_screen_of_the_readme():
    """One text: the page includes it."""
    readme, front = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    marks = re.findall(r":(?:start-after|end-before): (.*)", front)
    assert [readme.count(mark) for mark in marks] == [1, 1]
    screen = readme.partition(marks[0])[2].partition(marks[1])[0]
    assert screen.count("**") > 10
    assert "cprop.CProp(optimizer)" in screen


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_the_page_on_diagnostics_has_the_thresholds_of_the_monitor():
    page = (DOCS / "diagnostics.md").read_text()
    assert f"mean conformity above {SURE} for {PATIENCE:,} steps" in page
    assert f"from {100 * LEAST_FRACTION:.0f} % on" in page
    assert f"after {PATIENCE:,} steps" in page
    assert f"keeps at most {KEPT} of them" in page
    assert f"holds at most {KEPT}," in cprop.Monitor.__doc__


# The optimizer that the page on internals adds.


def lion():
    spec = importlib.util.spec_from_file_location("cprop_lion", LION)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CPropLion


def test_every_measure_is_documented():
    for name in cprop.MEASURES:
        assert f".. autofunction:: cprop.measures.{name}\n" in (DOCS / "api" / "conformity.md").read_text()
        assert f'`"{name}"`' in (DOCS / "settings.md").read_text()


def test_an_optimizer_is_added_in_under_60_lines_that_the_page_shows():
    assert len(LION.read_text().splitlines()) < 60
    assert "```{literalinclude} ../examples/cprop_lion.py\n```" in (DOCS / "internals.md").read_text()


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"c": 4.0, "beta": 0.9}], ids=str)
def test_the_added_optimizer_is_the_wrapper_around_the_plain_one_at_every_step(way, settings):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = [Parameter(x.clone()) for x in start], [Parameter(x.clone()) for x in start]
    native = lion()(ours, lr=1e-2, **way, **{f"cprop_{name}": value for name, value in settings.items()})
    wrapper = cprop.CProp(pytorch_optimizer.Lion(theirs, lr=1e-2, weight_decay=0.0), **settings)
    for _ in range(50):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = 0.1 * torch.randn(p.shape, generator=generator) + 0.03 * p.detach()
            q.grad = p.grad.clone()
        native.step()
        wrapper.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-4 if way.get("fused") else 2e-6)
    assert not torch.equal(ours[0], start[0])


def test_the_added_optimizer_trains_resumes_and_refuses():
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs[:, :2].sum(1, keepdim=True)

    def loss(model):
        return (model(inputs) - targets).square().mean()

    def advance(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

    model = torch.nn.Linear(8, 1)
    optimizer = lion()(model.parameters(), lr=1e-2)
    first = loss(model).item()
    advance(model, optimizer, 100)
    assert loss(model).item() < 0.1 * first

    resumed = torch.nn.Linear(8, 1)
    resumed.load_state_dict(model.state_dict())
    again = lion()(resumed.parameters(), lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    advance(model, optimizer, 20)
    advance(resumed, again, 20)
    assert torch.equal(model.weight, resumed.weight)
    with pytest.raises(ValueError, match=r"invalid betas\[0\]"):
        lion()(model.parameters(), betas=(1.0, 0.9))


# What the page on related methods says about memory.


@pytest.mark.parametrize(
    ("row", "expected", "build"),
    [
        ("**CProp** with AdamW", "12 native, 16 wrapper", cprop.CPropAdamW),
        ("**CProp** with AdamW", "16 wrapper", lambda params: cprop.CProp(torch.optim.AdamW(params))),
        ("AdaBelief", "8", pytorch_optimizer.AdaBelief),
        ("M-SVAG", "8", pytorch_optimizer.MSVAG),
        ("Schedule-Free AdamW", "8", schedulefree.AdamWScheduleFree),
        ("Prodigy", "16", pytorch_optimizer.Prodigy),
        ("Lion", "4", pytorch_optimizer.Lion),
        ("Rprop", "8", torch.optim.Rprop),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_state_is_as_large_as_the_page_says(row, expected, build):
    p = Parameter(torch.randn(1000))
    optimizer = build([p])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(2):
        p.grad = torch.randn(1000)
        optimizer.step()
    tensors = [x for x in optimizer.state[p].values() if isinstance(x, torch.Tensor) and x.numel() > 1]
    kept = sum(x.numel() * x.element_size() for x in tensors) / 1000
    assert kept == float(expected.split()[0])
    (line,) = (x for x in (DOCS / "related.md").read_text().splitlines() if x.startswith(f"| {row}"))
    assert expected in line.split("|")[3]
