"""The published results are those of the committed runs, which anyone can read without the laboratory's help."""

import argparse
import json
import math
import re
import shlex
import statistics
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from evidence import EVIDENCE, IMAGES, ROOT, cell_states, foretell, pages, report
from evidence.summary import WORKLOADS
from PIL import Image

from cprop_lab.analysis.curves import final_loss
from cprop_lab.analysis.scoreboard import difference, scores
from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.run.identity import run_id
from cprop_lab.store import Store

RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "docs" / "step.md", *sorted(RESULTS.rglob("*.md"))]
KEPT = pages.kept(EVIDENCE)
COMMITTED = {run.run_id: run for run in Store(EVIDENCE).runs()}


def test_a_published_number_by_hand():
    """Read with json and pyarrow alone, averaged as the page says: it is the number on the page."""
    ends = {}
    for run in pq.read_table(
        EVIDENCE / "experiments" / "fmnist-fc-reduced.parquet", columns=["about", "train_loss"]
    ).to_pylist():
        made = json.loads(run["about"])["specification"]
        settings = {"cprop_beta": 0.999, "cprop_start": 0, "cprop_measure": "normal"}
        usual = {**settings, **made["settings"]}.items() >= settings.items()
        if usual and (made["workload"], made["iterations"], made["lr"]) == ("fmnist-fc", 20_000, 0.1):
            ends.setdefault(made["optimizer"], []).append(statistics.fmean(run["train_loss"][-3:]))
    page = (RESULTS / "fmnist-fc.md").read_text()
    (line,) = re.findall(r"^\| CProp\(SGD\) \| 0\.1 \|.*$", page, flags=re.MULTILINE)
    for optimizer in ("sgd", "cprop-sgd"):
        assert len(ends[optimizer]) == 3
        assert f"{statistics.fmean(ends[optimizer]):.4f} ± {statistics.stdev(ends[optimizer]):.4f}" in line
    assert statistics.fmean(ends["cprop-sgd"]) < statistics.fmean(ends["sgd"])


def test_sections_that_mix_builds_of_torch_say_so():
    """Counted with json and pyarrow alone."""
    sections = re.compile(r"<!-- measured: evidence (\S+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)
    marked = {}
    for name, text in (found for page in PAGES for found in sections.findall(page.read_text())):
        packed = pq.read_table(EVIDENCE / "experiments" / f"{name}-reduced.parquet", columns=["identity", "about"])
        about = json.loads(packed.schema.metadata[b"experiment"])
        shown = {*about["runs"], *about["timings"]}
        made = [json.loads(run["about"])["made"]["torch"] for run in packed.to_pylist() if run["identity"] in shown]
        counts = " and ".join(f"{made.count(build)} with {build}" for build in sorted(set(made)))
        marked[name] = len(set(made)) > 1
        assert (f"**These runs mix builds of torch ({counts})" in text) == marked[name], name
    assert sum(marked.values()) == 7
    assert len(marked) > 30


def test_cell_states_are_those_of_the_scoreboards_learning_rates():
    selected = KEPT["scoreboard-1-ptb-lstm"].about["learning_rates"]
    for optimizer, lr in cell_states.OTHERS.items():
        assert lr == selected[f"ptb-lstm {optimizer.removeprefix('cprop-')}"]
    assert {run["name"] for run in report.results("cell_states")["runs"]} == set(cell_states.CASES)


def board(workload, ties=()):
    """The rows of a scoreboard by name, and which ends lowest, but for ties, of those that do not know the end."""
    entries = scores(*KEPT[f"scoreboard-{workload}"])
    unknowing = [entry for entry in entries if not entry.specification.optimizer_name.knows_horizon]
    first = min(unknowing, key=lambda entry: statistics.fmean(entry.end()))
    for entry in unknowing:
        assert (entry is first or entry.name in ties) != difference(first.runs, entry.runs).counts, entry.name
    return {entry.name: entry.runs for entry in entries}, first.name


def test_the_scoreboards_conclusions_on_the_small_gpt():
    rows, first = board("ptb-gpt")
    assert first == "CProp(Muon), averaged"
    cosine = difference(rows["Muon, cosine"], rows[first])
    assert f"{cosine.mean / cosine.error:.1f} standard errors" in (RESULTS / "scoreboard.md").read_text()
    assert not cosine.counts


def test_the_scoreboards_conclusions_on_the_transformer_on_words():
    rows, first = board("ptb-transformer")
    assert first == "Schedule-Free AdamW"
    ties = [name for name, runs in rows.items() if name != first and not difference(rows[first], runs).counts]
    assert ties == ["AdEMAMix"]  # its seeds lie too far apart
    assert not difference(rows["CProp(Muon), averaged"], rows["AdamW"]).counts


def test_the_scoreboards_conclusions_on_the_small_lstm():
    rows, first = board("ptb-lstm-small", ties=["Schedule-Free AdamW"])
    assert first == "AdamW, averaged"
    assert difference(rows[first], rows["Muon, cosine"]).counts
    for base, after in (("AdamW", ""), ("AdamW", ", averaged"), ("AdamW", ", cosine"), ("Muon", "")):
        loss = difference(rows[f"{base}{after}"], rows[f"CProp({base}){after}"])
        assert loss.counts
        assert loss.mean > 0
    above = difference(rows["AdamW"], rows["AdamW, cosine"])
    assert above.counts
    assert above.mean > 0
    level = [("Muon, averaged", "AdamW"), ("Muon, cosine", "AdamW"), ("CProp(AdamW)", "AdamW, cosine")]
    assert not any(difference(rows[one], rows[other]).counts for one, other in level)


@pytest.mark.parametrize(("workload", "ties"), [("fmnist-fc", []), ("fmnist-cnn", [", cosine"])])
def test_the_scoreboards_conclusions_on_fashion_mnist(workload, ties):
    rows, first = board(workload)
    assert first == "Muon, averaged"
    cosine = difference(rows[first], rows["Muon, cosine"])
    assert cosine.counts
    assert cosine.mean > 0
    for after in (", averaged", ", cosine", ""):
        gain = difference(rows[f"CProp(AdamW){after}"], rows[f"AdamW{after}"])
        assert gain.counts == (after not in ties)
        assert gain.mean > 0 or after in ties
        for row in (f"CProp(AdamW){after}", f"AdamW{after}"):
            behind = difference(rows["Schedule-Free AdamW"], rows[row])
            assert behind.counts
            assert behind.mean > 0


@pytest.mark.parametrize(
    ("workload", "after", "sign"),
    [
        ("ptb-gpt", "", 1),
        ("ptb-gpt", ", averaged", 1),
        ("ptb-transformer", "", 1),
        ("ptb-transformer", ", averaged", 0),
        ("fmnist-fc", "", -1),
        ("fmnist-fc", ", averaged", -1),
        ("fmnist-cnn", "", 0),
        ("fmnist-cnn", ", averaged", -1),
        ("ptb-lstm-small", "", -1),
        ("ptb-lstm-small", ", averaged", -1),
    ],
)
def test_where_cprop_lowers_muons_final_loss(workload, after, sign):
    rows = {entry.name: entry.runs for entry in scores(*KEPT[f"scoreboard-{workload}"])}
    lower = difference(rows[f"CProp(Muon){after}"], rows[f"Muon{after}"])
    assert lower.counts == bool(sign)
    assert sign * lower.mean >= 0


def test_where_muon_ties_on_the_convolutional_network():
    rows, _ = board("fmnist-cnn")
    assert not difference(rows["Schedule-Free AdamW"], rows["Muon"]).counts
    assert not difference(rows["CProp(Muon), averaged"], rows["Muon, cosine"]).counts


FINALIST = "CProp(Muon), layer mean, beta2 = 0.999, averaged, own rate"
DECAYING = "Muon, beta2 = 0.999, inverse square root, averaged, own rate"


@pytest.mark.parametrize(
    ("workload", "without", "decaying", "schedule_free"),
    [
        ("fmnist-fc", 1, -1, 1),
        ("fmnist-cnn", 1, 1, 1),
        ("ptb-lstm-small", 1, 1, 1),
        ("ptb-transformer", -1, -1, 0),
        ("ptb-gpt", 1, 0, 1),
    ],
)
def test_the_finalist_beside_its_controls_and_schedule_free(workload, without, decaying, schedule_free):
    """1 where the finalist's final training loss is lower, -1 where it is higher, and 0 for a tie."""
    rows = {entry.name: entry.runs for entry in scores(*KEPT[f"finalists-{workload}"])}
    finalist = rows[FINALIST]
    for name, sign in (
        ("Muon, beta2 = 0.999, averaged, own rate", without),
        (DECAYING, decaying),
        ("Schedule-Free AdamW", schedule_free),
    ):
        found = difference(finalist, rows[name])
        assert (found.counts and math.copysign(1, found.mean)) == sign, name


@pytest.mark.parametrize(
    ("workload", "lower", "higher"),
    [
        ("fmnist-fc", DECAYING, None),  # lower than all others
        ("fmnist-cnn", FINALIST, None),
        ("ptb-lstm-small", FINALIST, None),
        ("ptb-gpt", FINALIST, "Muon, averaged"),
        ("ptb-gpt", "Muon, cosine", FINALIST),
        ("ptb-transformer", "Muon, beta2 = 0.999, averaged, own rate", "Schedule-Free AdamW"),
    ],
)
def test_which_rows_of_the_finalists_boards_end_lower(workload, lower, higher):
    rows = {entry.name: entry.runs for entry in scores(*KEPT[f"finalists-{workload}"])}
    for name in rows.keys() - {lower} if higher is None else [higher]:
        found = difference(rows[lower], rows[name])
        assert found.counts, name
        assert found.mean > 0, name


@pytest.mark.parametrize("workload", WORKLOADS)
def test_muon_with_a_decay_and_averaged_weights_beside_cprop_and_schedule_free(workload):
    """The advice of the guide: it is behind neither on any workload."""
    finalists, others = (
        {entry.name: entry.runs for entry in scores(*KEPT[f"{kind}-{workload}"])}
        for kind in ("finalists", "scoreboard")
    )
    for name in ("Schedule-Free AdamW", "CProp(Muon), averaged"):
        lower = difference(finalists[DECAYING], others[name])
        assert lower.counts == ((workload, name) != ("ptb-gpt", "CProp(Muon), averaged"))
        assert lower.mean > 0 or not lower.counts


RATES = ("CProp(Muon), layer mean", "Muon, inverse time", "Muon, inverse square root", "Muon")


def losses_by_rate(workload):
    """The final training losses of each row, by learning rate."""
    rows = {name: {} for name in RATES}
    for run in KEPT[f"finalist-rates-{workload}"].runs:
        specification = run.specification
        name = specification.label.replace(", beta2 = 0.999", "").removesuffix(", averaged")
        rows[name][specification.lr] = final_loss(run)
    return rows


def test_most_of_the_finalists_lead_on_the_lstm_was_its_rate():
    rows = losses_by_rate("ptb-lstm-small")
    best = {name: min(losses.values()) for name, losses in rows.items()}
    assert sorted(best, key=best.get) == list(RATES)
    at_boards = rows["Muon"][0.03] - rows[RATES[0]][0.03]
    assert best["Muon"] - best[RATES[0]] < at_boards / 4


@pytest.mark.parametrize("workload", ["ptb-lstm-small", "fmnist-cnn"])
def test_the_finalist_ends_nearest_to_the_inverse_of_time_at_every_rate(workload):
    rows = losses_by_rate(workload)
    for lr, loss in rows[RATES[0]].items():
        assert min(RATES[1:], key=lambda name: abs(rows[name][lr] - loss)) == "Muon, inverse time"


def test_no_candidate_around_adamw_is_ahead_of_schedule_free():
    """And telling elements apart gains as much without slowing down, at about a third of the rate."""
    best = {}
    for run in KEPT["candidate-rates-fmnist-fc"].runs:
        best[run.specification.label] = min(final_loss(run), best.get(run.specification.label, math.inf))
    ahead, *close, plain = sorted(best, key=best.get)
    assert ahead == "Schedule-Free AdamW"
    assert plain == "AdamW, averaged"
    assert best[ahead] < 0.8 * min(best[name] for name in close)
    assert max(best[name] for name in close) < 0.7 * best[plain]


def test_no_two_scoreboards_share_timings():
    """They were measured on different days, when the machine had different speeds."""
    timings = [run.run_id for board in KEPT.values() for run in board.timings]
    assert len(timings) == len(set(timings))


def test_two_candidates_around_muon_end_lower_than_muon():
    best = {}
    for run in KEPT["candidates-ptb-gpt"].runs:
        name = run.specification.label
        best[name] = min(final_loss(run), best.get(name, math.inf))
    assert len(best) == 25
    lower = {name for name, loss in best.items() if loss < best["Muon, averaged"]}
    assert lower == {"CProp(Muon), layer mean, averaged", "Muon-VS, averaged"}


def test_no_sign_in_a_plain_run_foretells_more_than_its_length():
    cases = foretell.seen()
    over_all = foretell.correlations(list(cases.values()))
    assert max(over_all, key=lambda sign: abs(over_all[sign][0])) == "steps"
    alone = foretell.correlations([case for name, case in cases.items() if name.startswith(foretell.SAME)])
    assert alone
    assert all(low < 0 < high for _, low, high in alone.values())


def test_every_release_of_torch_from_the_bound_on_was_tested_and_nothing_failed():
    """To mend it: ``python -m benchmarks.versions``, with the releases that are missing."""
    rows = report.results("versions")
    bound = re.search(r'^dependencies = \["torch>=2\.(\d+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    releases = range(int(bound[1]), int(rows[-1]["minor"].removeprefix("2.")) + 1)
    assert [row["minor"] for row in rows] == [f"2.{release}" for release in releases]
    for row in rows:
        assert row["torch"].startswith(f"{row['minor']}.")
        assert re.fullmatch(r"[0-9a-f]{12}", row["commit"])
        assert row["quick"]["passed"] > 900
        assert row["quick"]["failed"] == [], row["minor"]
        assert "failed" not in row["check"]
    for row in (rows[0], rows[-1]):
        assert row["slow"]["passed"] > 100
        assert row["slow"]["failed"] == [], row["minor"]
    said = f"2.{releases[0]} to 2.{releases[-1]}"
    readme = (ROOT / "README.md").read_text()
    assert f"torch {said}" in readme
    assert f"torch 2.{releases[0]} or later" in readme.replace("\n", " ")
    assert f'release: "2.{releases[0]}"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_a_changed_number_is_found():
    page = (RESULTS / "fmnist-fc.md").read_text()
    changed = re.sub(r"(\| CProp\(SGD\) \| 0\.1 \| 0\.)\d", r"\g<1>0", page, count=1)
    assert changed != page == report.filled(changed)


@pytest.mark.parametrize("name", KEPT)
def test_figures_were_drawn_from_the_committed_runs(name):
    """To mend it: ``python -m evidence.report``."""
    pictures = list(pages.pictures(KEPT[name], IMAGES))
    assert pictures
    digest = pages.digest(KEPT[name])
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.text[pages.DRAWN_FROM] == digest


def test_every_experiment_is_on_a_page_and_complete():
    texts = "".join(page.read_text() for page in PAGES)
    for name, experiment in KEPT.items():
        assert f"<!-- measured: evidence {name} -->" in texts, name
        assert len(experiment.runs) == len(experiment.about["runs"])
        assert len(experiment.timings) == len(experiment.about.get("timings", ()))
        for path in pages.pictures(experiment, IMAGES):
            assert f"images/results/{path.name}" in texts, path.name


def test_pictures_on_pages_are_there():
    for page in (*PAGES, ROOT / "README.md"):
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
    for name, experiment in KEPT.items():
        if name.startswith("scoreboard-1-"):  # made under the first version of the rules, which were other runs
            packed = pq.read_table(EVIDENCE / "experiments" / f"{name}-reduced.parquet", columns=["identity"])
            needed.update(packed["identity"].to_pylist())
            continue
        about, asked = again(experiment.about)
        needed.update(asked)
        assert {**about, "command": experiment.about["command"]} == experiment.about
    assert set(COMMITTED) == needed


def test_experiments_are_committed_packed():
    """To mend it: ``cprop-lab pack --storage evidence``."""
    found = {path.name for path in (EVIDENCE / "experiments").rglob("*")}
    assert found == {f"{name}-reduced.parquet" for name in KEPT}
    assert not (EVIDENCE / "runs").exists()


def test_a_run_is_the_same_in_the_files_of_all_its_experiments():
    seen = {}
    for path in sorted((EVIDENCE / "experiments").iterdir()):
        runs = pq.read_table(path)
        for row, name in enumerate(runs["identity"].to_pylist()):
            run = runs.slice(row, 1)
            if run is not seen.setdefault(name, run):
                assert repr(run.to_pylist()) == repr(seen[name].to_pylist())
    assert set(seen) == set(COMMITTED)


def test_runs_say_how_they_were_made():
    for run in COMMITTED.values():
        assert run_id(run.specification) == run.run_id  # the present code would make the same run
        assert re.fullmatch(r"[0-9a-f]{12}", run.provenance["commit"])  # and not of changed files
