"""The published results are those of the committed runs, which anyone can read without the laboratory's help."""

import argparse
import json
import re
import shlex
import statistics
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from benchmarks import cell_states, evidence, report
from PIL import Image

from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.run.identity import run_id
from cprop_lab.store import Store

PAGES = sorted((report.ROOT / "docs" / "results").glob("*.md"))
RUNS = sorted((evidence.STORE / "runs").glob("*.json"))
COMMITTED = {run.run_id: run for run in Store(evidence.STORE).runs()}


def rows(path):
    return pq.read_table(path.with_suffix(".parquet")).to_pylist()


def test_a_published_number_by_hand():
    """Read with json and pyarrow alone, averaged as the page says: it is the number on the page."""
    ends = {}
    for path in RUNS:
        made = json.loads(path.read_text())["specification"]
        settings = {"cprop_beta": 0.999, "cprop_start": 0, "cprop_measure": "normal"}
        usual = {**settings, **made["settings"]}.items() >= settings.items()
        if usual and (made["workload"], made["iterations"], made["lr"]) == ("fmnist-fc", 20_000, 0.1):
            last = [row["train_loss"] for row in rows(path)][-3:]
            ends.setdefault(made["optimizer"], []).append(statistics.fmean(last))
    page = (report.ROOT / "docs" / "results" / "fmnist-fc.md").read_text()
    (line,) = re.findall(r"^\| CProp\(SGD\) \| 0\.1 \|.*$", page, flags=re.MULTILINE)
    for optimizer in ("sgd", "cprop-sgd"):
        assert len(ends[optimizer]) == 3
        assert f"{statistics.fmean(ends[optimizer]):.4f} ± {statistics.stdev(ends[optimizer]):.4f}" in line
    assert statistics.fmean(ends["cprop-sgd"]) < statistics.fmean(ends["sgd"])


def test_cell_states_are_those_of_the_scoreboards_learning_rates():
    about = json.loads((evidence.STORE / "experiments" / "scoreboard-ptb-lstm-reduced.json").read_text())
    for optimizer, lr in cell_states.OTHERS.items():
        assert lr == about["learning_rates"][f"ptb-lstm {optimizer.removeprefix('cprop-')}"]
    assert {run["name"] for run in report.results("cell_states")["runs"]} == set(cell_states.CASES)


def test_a_changed_number_is_found():
    page = (report.ROOT / "docs" / "results" / "fmnist-fc.md").read_text()
    changed = re.sub(r"(\| CProp\(SGD\) \| 0\.1 \| 0\.)\d", r"\g<1>0", page, count=1)
    assert changed != page == report.filled(changed)


@pytest.mark.parametrize("name", evidence.kept())
def test_figures_were_drawn_from_the_committed_runs(name):
    """To mend it: ``python -m benchmarks.report``."""
    pictures = list(evidence.pictures(name))
    assert pictures
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.text[evidence.DRAWN_FROM] == evidence.digest(evidence.kept()[name])


def test_every_experiment_is_on_a_page_and_complete():
    pages = "".join(page.read_text() for page in PAGES)
    for name, experiment in evidence.kept().items():
        assert f"<!-- measured: evidence {name} -->" in pages, name
        assert len(experiment.runs) == len(experiment.about["runs"])
        assert len(experiment.timings) == len(experiment.about.get("timings", ()))
        for path in evidence.pictures(name):
            assert f"images/results/{path.name}" in pages, path.name


def test_pictures_on_pages_are_there():
    for page in (*PAGES, report.ROOT / "README.md"):
        for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / path).is_file(), path


def again(about):
    """Make an experiment as its command says, from the committed runs alone; with all the runs that it asked for."""
    options = argparse.ArgumentParser()
    options.add_argument("name")
    options.add_argument("--preset")
    options.add_argument("--seeds", type=int)
    options.add_argument("--optimizers")
    options.add_argument("--paper-rates", dest="select", action="store_false", default=None)
    given = options.parse_args(shlex.split(about["command"])[2:])
    chosen, preset = EXPERIMENTS[given.name], PRESETS[given.preset]
    asked = []

    def committed(specifications):
        asked.extend(map(run_id, specifications))
        return [COMMITTED[run_id(specification)] for specification in specifications]

    chosen = chosen.only(given.optimizers.split(",")) if given.optimizers else chosen
    preset = replace(preset, seeds=given.seeds) if given.seeds else preset
    return chosen.run(preset, committed, given.select), asked


def test_every_experiment_can_be_made_again_from_the_committed_runs():
    """The searches for learning rates too: they find those that were used. And no run is there for nothing."""
    needed = set()
    for experiment in evidence.kept().values():
        about, asked = again(experiment.about)
        needed.update(asked)
        assert {**about, "command": experiment.about["command"]} == experiment.about
    assert set(COMMITTED) == needed


def test_runs_say_how_they_were_made():
    assert len(COMMITTED) == len(RUNS)
    for run in COMMITTED.values():
        assert run_id(run.specification) == run.run_id  # the present code would make the same run
        assert re.fullmatch(r"[0-9a-f]{12}", run.provenance["commit"])  # and not of changed files


def test_sentences_have_no_numbers_of_their_own():
    """In prose, a measured number stands between markers, so that it is made anew; tables are, too."""
    for page in (page for page in PAGES if page.name != "scoreboard.md"):
        text = re.sub(r"<!-- (measured|fact): .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"^>.*$|`[^`]*`|\(section [\d.]+\)", "", text, flags=re.MULTILINE)
        assert re.findall(r"\d+\.\d+ (?!is half)\S+|\d+ %", text) == [], page.name


def test_no_line_begins_with_a_marker():
    """Markdown takes a line that begins with a comment out of its paragraph: the sentence would break there."""
    for page in report.PAGES:
        assert re.findall(r"^\s*<!-- fact.*$", page.read_text(), flags=re.MULTILINE) == [], page.name
