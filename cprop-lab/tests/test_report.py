"""The page holds the numbers, says what is missing, and needs nothing but itself."""

import csv
import re
from html.parser import HTMLParser

import pytest
from markupsafe import escape
from test_figures import AS_FAST, FASTER, MADE, NEVER, PLAIN, specification, write

from cprop_lab.analysis.pairs import pairs
from cprop_lab.analysis.verdict import verdict
from cprop_lab.output.figures import draw
from cprop_lab.output.report import write as write_page
from cprop_lab.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def keep(store, runs, name="fmnist-fc", **changes):
    """Keep an experiment."""
    about = {
        "experiment": name,
        "title": f"Title of {name}",
        "claim": "It is faster.",
        "figure": "Figure 2",
        "preset": "reduced",
        "reduced": True,
        "kind": "curves",
        "panels": ["train_loss", "accuracy", "mean_scale"],
        "runs": list(runs),
        "command": f"cprop-lab run {name} --preset reduced",
        "learning_rates": {"sgd": 0.1},
        **changes,
    }
    store.write_experiment(f"{name}-{about['preset']}", about)
    return about


def pair(store, plain=(PLAIN, PLAIN), scaled=(FASTER, AS_FAST), **changes):
    """An optimizer without and with CProp, on two seeds."""
    accuracies = ([0.8] * 5, [0.82] * 5)
    return [
        write(store, specification(name, seed, **changes), losses[seed], metrics=accuracies[seed], step_seconds=seconds)
        for name, losses, seconds in (("sgd", plain, 0.01), ("cprop-sgd", scaled, 0.02))
        for seed in (0, 1)
    ]


class Page(HTMLParser):
    """What a browser sees: tables as lists of cells, ids, and that all that is opened is closed."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.tables, self.open, self.ids, self.attributes = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag in self.VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def page_of(store, tmp_path):
    path = tmp_path / "folder" / "report.html"
    write_page(store, path)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_numbers_are_those_worked_out_by_hand(store, tmp_path):
    keep(store, pair(store))
    text, page = page_of(store, tmp_path)
    to_target, ends = page.tables
    assert to_target[1] == [
        "CProp(SGD)",
        "2",
        "400",  # iterations
        "350 ± 71",
        "0.88 ± 0.18",
        "4",  # seconds: a step takes twice as long
        "7.0 ± 1.4",
        "1.75 ± 0.35",
        "2 of 2",
    ]
    assert ends == [
        ["optimizer", "learning rate", "seeds", "training loss", "test loss", "test accuracy", "ms per step"],
        ["SGD", "0.1", "2", "2", "3", "81.0 ± 1.4 %", "10"],
        ["CProp(SGD)", "0.1", "2", "2", "3", "81.0 ± 1.4 %", "20"],
    ]
    (link,) = (value for name, value in page.attributes if name == "href" and not value.startswith("#"))
    assert link == "report-runs/fmnist-fc-reduced.csv"
    with (tmp_path / "folder" / link).open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert {run["ended"] for run in runs} == {"finished"}
    assert [(run["optimizer"], run["seed"]) for run in runs] == [
        (name, seed) for name in ("sgd", "cprop-sgd") for seed in "01"
    ]
    assert text.count("<figure") == 2
    assert text.count('<figure class="bars"') == 1  # which a phone shows whole
    for words in ("It is faster.", "Figure 2", "reduced: shorter than the paper", "2.13.0", "0123abc", "sgd: 0.1"):
        assert words in text
    assert "not finished" not in text


@pytest.mark.slow
def test_it_needs_nothing_but_itself(store, tmp_path):
    keep(store, pair(store))
    keep(store, pair(store), name="scales", kind="histogram")
    text, page = page_of(store, tmp_path)
    assert "http" not in text
    assert "<script" not in text
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(link.startswith(("#", "data:image/png;base64,", "report-runs/")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.slow
def test_the_same_results_make_the_same_page(store, tmp_path):
    keep(store, pair(store))
    assert page_of(store, tmp_path)[0] == page_of(store, tmp_path)[0]


@pytest.mark.slow
def test_everything_is_escaped(store, tmp_path):
    mean = "<b>\"&'"
    keys = ("title", "claim", "figure", "preset", "command")
    keep(store, [*pair(store), mean], learning_rates={mean: 1.0}, **dict.fromkeys(keys, mean))
    text, _ = page_of(store, tmp_path)
    assert "<b>" not in text
    assert "&lt;b&gt;&#34;&amp;&#39;" in text


@pytest.mark.slow
def test_what_is_missing_is_named_with_the_command_that_finishes_it(store, tmp_path):
    keep(store, [*pair(store), "feedfeedfeedfeed"])
    text, _ = page_of(store, tmp_path)
    assert re.search(r"1 of 5 runs are not finished and are\s+missing below: <code>feedfeedfeedfeed</code>", text)
    assert re.search(r"To finish them:\s+<pre>cprop-lab run fmnist-fc --preset reduced</pre>", text)
    assert "1 of 5 runs missing" in text  # in the contents, too


@pytest.mark.slow
def test_the_page_stays_small_however_many_runs_there_are(store, tmp_path):
    few = [write(store, specification(name, seed), PLAIN) for name in ("sgd", "cprop-sgd") for seed in range(300)]
    keep(store, few)
    small = len(page_of(store, tmp_path)[0])
    more = [write(store, specification(name, 300 + i), PLAIN) for name in ("sgd", "cprop-sgd") for i in range(300)]
    keep(store, [*few, *more, *(f"{i:016x}" for i in range(1000))])
    text, _ = page_of(store, tmp_path)
    assert len(text) < 1.1 * small
    assert "1000 of 2200 runs are not finished" in text
    assert "and 980 more" in text
    assert (tmp_path / "folder" / "report-runs" / "fmnist-fc-reduced.csv").read_text().count("\n") == 1201


@pytest.mark.parametrize("kind", ["curves", "histogram", "learning-rates", "rates"])
def test_an_experiment_without_finished_runs(store, tmp_path, kind):
    keep(store, ["feedfeedfeedfeed"], kind=kind)
    text, page = page_of(store, tmp_path)
    assert "<figure" not in text
    assert not page.tables
    assert "feedfeedfeedfeed" in text


def test_an_empty_store(store, tmp_path):
    assert "No experiment has been run yet" in page_of(store, tmp_path)[0]


@pytest.mark.slow
def test_it_says_what_the_terminal_says(store, tmp_path):
    keep(store, pair(store))
    text, _ = page_of(store, tmp_path)
    for name, found in pairs(store.runs()).items():
        said = verdict(name, found)
        assert str(escape(said.headline)) in text
        assert len(said.notes) == 2
        assert all(str(escape(note)) in text for note in said.notes)


@pytest.mark.slow
def test_what_was_not_reached_or_diverged_is_told(store, tmp_path):
    some = pair(store, scaled=(FASTER, NEVER))
    none = pair(store, scaled=(NEVER, NEVER), batch_size=64)
    lost = [
        write(store, specification("adam", seed), [8, 90], status="diverged", step_seconds=0.01) for seed in (0, 1)
    ] + [write(store, specification("cprop-adam", seed), FASTER) for seed in (0, 1)]
    keep(store, [*some, *none, *lost])
    text, page = page_of(store, tmp_path)
    to_target, ends = page.tables
    cells = {row[0]: row for row in to_target[1:]}
    assert cells["CProp(SGD)"][3:5] + cells["CProp(SGD)"][-1:] == ["300", "0.75", "1 of 2"]
    assert cells["CProp(SGD) (batch size 64)"][3:5] == ["not reached"] * 2
    assert cells["CProp(SGD) (batch size 64)"][-1] == "0 of 2"
    assert cells["CProp(Adam)"][1] == "did not learn without CProp"
    assert "flatter CProp" in text
    assert ["fmnist-fc (batch size 32)", "Adam", "0.1", "2 (2 diverged)", "diverged", "-", "-", "10"] in ends


@pytest.mark.slow
def test_workloads_are_told_apart(store, tmp_path):
    keep(store, pair(store) + pair(store, workload="fmnist-cnn"))
    _, page = page_of(store, tmp_path)
    assert [row[0] for row in page.tables[0][1:]] == ["fmnist-fc: CProp(SGD)", "fmnist-cnn: CProp(SGD)"]
    assert [row[:2] for row in page.tables[1]][:3] == [
        ["workload", "optimizer"],
        ["fmnist-fc", "SGD"],
        ["fmnist-fc", "CProp(SGD)"],
    ]


def test_builds_of_torch_that_are_mixed_are_marked(store, tmp_path):
    made = pair(store)
    keep(store, made)
    assert "builds of torch" not in page_of(store, tmp_path)[0]
    another = write(store, specification("sgd", 2), PLAIN, made={**MADE, "torch": "2.14.0"})
    keep(store, [*made, another])
    text, _ = page_of(store, tmp_path)
    assert "These runs mix builds of torch (4 with 2.13.0 and 1 with 2.14.0), which may round differently." in text
    assert "mixed builds of torch</span>" in text  # in the contents, too


def test_without_accuracy_or_perplexity_there_is_no_such_column(store, tmp_path):
    keep(store, [write(store, specification("sgd"), PLAIN, metrics=[None] * 5)])
    _, page = page_of(store, tmp_path)
    assert page.tables[0][0] == ["optimizer", "learning rate", "seeds", "training loss", "test loss", "ms per step"]


def test_figures_of_their_own_are_titled_and_named(store):
    about = keep(store, pair(store))
    drawn = draw(about, store.runs(about["runs"]))
    assert list(drawn) == ["", "-times"]
    assert {" ".join(figure.get_suptitle().split()) for figure in drawn.values()} == {
        "Title of fmnist-fc · reduced: shorter than the paper preset"
    }
    rates = keep(store, [write(store, specification("sgd"), PLAIN)], name="rates", kind="learning-rates", reduced=False)
    (figure,) = draw(rates, store.runs(rates["runs"])).values()
    assert figure.get_suptitle() == "Title of rates"
    assert figure.axes[0].get_xlabel() == "learning rate"
