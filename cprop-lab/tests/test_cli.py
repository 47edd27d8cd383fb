"""The command line, as a person uses it: real commands in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from conftest import PYTHONPATH
from typer.testing import CliRunner

from cprop_lab.cli import app
from cprop_lab.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LAB = [sys.executable, "-m", "cprop_lab"]


def environment(root):
    return {**os.environ, "CPROP_LAB_DATA": str(root), "PYTHONPATH": PYTHONPATH, "COLUMNS": "160", "NO_COLOR": "1"}


@pytest.fixture
def lab(tmp_path, generated):
    """Run a command in an empty folder, on files in the form of the real data."""

    def run(*words, code=0, program=LAB, **changes):
        result = subprocess.run(
            [*program, *map(str, words)],
            cwd=tmp_path,
            env={**environment(generated), "XDG_CACHE_HOME": str(tmp_path / "cache"), **changes},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert result.returncode == code, result.stdout + result.stderr
        assert "Traceback" not in result.stdout + result.stderr
        return re.sub(r"\s+", " ", result.stdout)

    return run


SESSION = """
import json, sys
from cprop_lab.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["cprop-lab", *words]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    print(f"exit {code}", flush=True)
"""


HALF = """
from pathlib import Path
from tasks import Blobs
class Half(Blobs):
    steps = 0
    def before_step(self, model):
        self.steps += 1
        if self.steps == 10:
            Path("once").open("x").close()  # the second run that gets here fails
"""


@pytest.fixture
def session(lab):
    """Several commands in one process, for what does not depend on its start; what each says, and its exit code."""

    def run(*commands):
        said = lab(json.dumps(commands), program=[sys.executable, "-c", SESSION])
        parts = re.split(r"exit (\d+) ", said)
        return list(zip(parts[::2], map(int, parts[1::2]), strict=False))

    return run


def test_help_is_quick_and_says_what_there_is(lab):
    heavy = "import sys, cprop_lab.cli; print({'torch', 'matplotlib', 'ray', 'pyarrow'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", heavy], text=True, timeout=500) == "set()\n"
    said = lab("--help")
    for command in ("list", "run", "plot", "report", "compare", "cost", "pack", "export"):
        assert f" {command} " in said


def test_the_list_names_every_experiment(lab):
    said = lab("list")
    assert "fmnist-fc Figure 2" in said
    assert "lr-selection-tiny-imagenet-resnet" in said


def test_from_a_run_to_a_page(lab, session, tmp_path):
    """In this process, one optimizer and one seed: an experiment, its figure, its page, and nothing run twice."""
    words = ("run", "fmnist-fc", "--optimizers", "rmsprop", "--seeds", 1, "--executor", "process")
    said = lab(*words)
    assert "Figure: " in said
    assert (tmp_path / "results" / "figures" / "fmnist-fc-smoke.png").stat().st_size > 10_000
    assert "CProp(RMSProp)" in said
    again = lab(*words, "--json", "verdicts.json")
    written = json.loads((tmp_path / "verdicts.json").read_text())
    assert set(written["runs"]) == Store(tmp_path / "results").finished()
    (verdict,) = written["verdicts"].values()
    assert verdict["headline"] in again
    assert "running the experiment: 2 of 2 runs are already finished and are reused" in again
    assert "RMSProp + CProp may help: it reaches RMSProp's final training loss" in again
    assert "Note: One seed cannot tell a difference from chance" in again
    assert again.endswith("The smoke preset checks that everything works; it says nothing about CProp. ")
    after = session(
        [*map(str, words), "--dry-run"],
        [*map(str, words), "--seeds", "3", "--dry-run"],
        ["compare", "tasks:Blobs", "--optimizers", "sgd,schedule-free-adamw", "--iterations", "100", "--dry-run"],
        ["pack"],
        ["plot", "fmnist-fc", "--out", "pictures"],
        ["report"],
        ["export", "--to", "tensorboard", "--target", "events"],
        ["plot", "nothing"],
    )
    assert [code for _, code in after] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert "runs 2 2 of which to be run 0 0" in after[0][0]
    assert "runs 6 6 of which to be run 4 4" in after[1][0]
    assert "runs 27 93 of which to be run 18 93 their iterations 1,800 9,300" in after[2][0]
    assert "fmnist-fc-smoke.parquet: 2 runs" in after[3][0]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} >= {"fmnist-fc-smoke.png"}
    page = (tmp_path / "report.html").read_text()
    assert "cprop-lab run fmnist-fc --optimizers rmsprop --seeds 1 --executor process" in page
    assert str(tmp_path) not in page  # a page may be published
    assert len(list((tmp_path / "events").rglob("events.out.*"))) == 2
    assert "no results of nothing in results" in after[-1][0]


def test_a_comparison_of_two_builds_of_torch_is_refused_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "tasks:Blobs", "--optimizers", "sgd", "--iterations", "10", "--executor", "process", "--eager"]

    def compare(*more):
        told = CliRunner().invoke(app, [*words, *more])
        return told.exit_code, " ".join(told.stdout.split())

    with monkeypatch.context() as older:
        older.setattr(torch, "__version__", "2.6.0+another")
        assert compare("--seeds", "1")[0] == 0
    store = Store(tmp_path / "results")
    before = store.finished()
    code, said = compare("--seeds", "2")
    assert code == 1
    assert f"3 with {torch.__version__} and 3 with 2.6.0+another " in said
    assert "Give --storage another folder to run all of them with this torch" in said
    assert store.finished() == before
    code, said = compare("--seeds", "1")
    assert (code, "builds of torch" in said) == (0, False)
    code, said = compare("--seeds", "2", "--mix-builds")
    assert (code, "Note: These runs mix builds of torch (" in said) == (0, True)
    assert compare("--seeds", "2", "--storage", "another")[0] == 0


def test_a_home_that_cannot_be_written_is_done_without(lab, tmp_path):
    (tmp_path / "temporary").mkdir()
    program = ["env", "-u", "XDG_CACHE_HOME", "-u", "HF_HOME", *LAB]
    words = ["run", "fmnist-fc", "--optimizers", "rmsprop", "--seeds", 1, "--executor", "process", "--eager"]
    said = lab(*words, program=program, HOME="/sys/nowhere", TMPDIR=str(tmp_path / "temporary"))
    assert "Figure: " in said
    assert list((tmp_path / "temporary" / f"cprop-lab-{os.getuid()}").glob("fashion_mnist-*.npy"))


def test_a_time_limit_stops_as_ctrl_c_does(lab, tmp_path):
    words = ["compare", "tasks:Slow", "--optimizers", "rmsprop", "--iterations", "100000", "--executor", "process"]
    words += ["--json", "verdicts.json", "--selection-iterations", "20", "--seeds", "1"]
    assert "run the same command again to continue" in lab(*words, "--time-limit", 0.4, code=130)
    written = json.loads((tmp_path / "verdicts.json").read_text())
    assert (written["ended"], written["verdicts"]) == ("stopped", {})


def test_what_is_finished_when_a_command_fails_is_written(lab, tmp_path):
    """The run with CProp fails; the one without it is there."""
    (tmp_path / "mine.py").write_text(HALF)
    words = ["compare", "mine:Half", "--optimizers", "rmsprop", "--iterations", "20", "--selection-iterations", "5"]
    said = lab(*words, "--seeds", 1, "--executor", "process", "--eager", "--json", "verdicts.json", code=3)
    assert "1 of 2 runs failed; the first, mine:Half with cprop-rmsprop" in said
    written = json.loads((tmp_path / "verdicts.json").read_text())
    assert written["ended"] == "failed"
    assert "FileExistsError" in written["error"]
    assert written["verdicts"] == {}
    (run,) = written["runs"]
    assert Store(tmp_path / "results").read(run).specification.optimizer == "rmsprop"


def test_ctrl_c_leaves_things_resumable(tmp_path, generated):
    words = ["compare", "tasks:Slow", "--optimizers", "rmsprop", "--iterations", "600", "--seeds", "1"]
    words += ["--selection-iterations", "50", "--executor", "process"]
    # Ctrl-C, and what a queue or Kubernetes sends.
    finished = partial((tmp_path / "results").glob, "runs/*.arrow")
    for sent in (signal.SIGINT, signal.SIGTERM):
        before = len(list(finished()))
        process = subprocess.Popen(
            [*LAB, *words],
            cwd=tmp_path,
            env=environment(generated),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Where the tests run in the background, Ctrl-C is ignored, and children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        with process:
            end = time.monotonic() + 300
            while len(list(finished())) == before and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(sent)
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 130, said
        assert "Stopped. Finished work is kept; run the same command again to continue." in re.sub(r"\s+", " ", said)
    result = subprocess.run(
        [*LAB, *words], cwd=tmp_path, env=environment(generated), capture_output=True, text=True, timeout=500
    )
    said = re.sub(r"\s+", " ", result.stdout)
    assert result.returncode == 0, said + result.stderr
    assert "\x1b" not in result.stdout  # in a log, lines and nothing else
    assert re.search(
        r"selecting learning rates, round 1 of about 3: \d of 3 runs are already finished and are reused", said
    )
    assert "comparing without and with CProp: 2 runs [" in said
    assert re.search(r"\[100 %\] tasks:Slow CProp\(RMSProp\) lr \S+ seed 0: training loss", said)
    assert "RMSProp + CProp" in said
    assert "iterations to that loss" in said
    assert re.search(r"Learning rate of rmsprop: [\d.e-]+ \(training loss by learning rate: ", said)
    assert (tmp_path / "comparison.png").exists()


MISTAKES = {
    "unknown experiment 'nothing': 'cprop-lab list' shows all of them": ["run", "nothing"],
    "ptb-lstm does not include lion: choose from sgd, adam": ["run", "ptb-lstm", "--optimizers", "lion"],
    "'tasks:Nothing' cannot be imported from": ["compare", "tasks:Nothing"],
    "is no task: derive it from cprop_lab.Task": ["compare", "test_cli:partial"],
    "unknown optimizer 'adamm'": ["compare", "tasks:Blobs", "--optimizers", "adamm"],
    "results holds no results: give --storage a folder that has some, or run an experiment first": ["plot"],
    "nowhere holds no results": ["report", "--storage", "nowhere"],
}


def test_mistakes_are_told_in_a_sentence(session, tmp_path):
    told = session(*MISTAKES.values())
    for message, (said, code) in zip(MISTAKES, told, strict=True):
        assert message in said
        assert code == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # and no folder is made for results


def test_a_mistake_in_a_task_is_told_before_ray_is_started(lab, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tasks import Blobs\nclass Mine(Blobs):\n    def loss(self, m, b): return m(b[0])"
    )
    (tmp_path / "ray.py").write_text("raise SystemExit('Ray was imported')\n")
    said = lab("compare", "mine:Mine", code=1)
    assert "Error: Mine.loss (mine.py, line 3) returns a tensor of shape (32, 2): give the mean over the batch" in said


def test_data_that_cannot_be_downloaded_are_told(lab):
    said = lab("run", "fmnist-fc", code=1, CPROP_LAB_DATA="", HF_HUB_OFFLINE="1")
    assert re.search(r"'zalando-datasets/fashion_mnist' cannot be downloaded .*: give --data FOLDER, which holds", said)


def test_a_cost_is_estimated_from_real_steps(lab):
    said = lab("cost", "fmnist-fc", "--preset", "paper")
    # 2 x 3 operations a weight and example, 32 examples, 20,000 steps, 30 runs; evaluations are forward passes over the
    # 96 + 40 examples that there are, 100 times a run.
    weights = 784 * 300 + 300 * 100 + 100 * 10
    steps = 30 * 20_000 * 6 * weights * 32
    # The first layer's inputs need no gradient.
    steps -= 30 * 20_000 * 2 * 784 * 300 * 32
    evaluations = 30 * 100 * (96 + 40) * 2 * weights
    operations = float(re.search(r"fmnist-fc 30 600,000 ([\d.]+)", said)[1])
    assert operations == pytest.approx((steps + evaluations) / 1e15, rel=0.01)
