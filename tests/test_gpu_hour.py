"""The hour on a GPU, as far as it can be run without one: at toy size, interrupted, and by its rule."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gpu_hour

ROOT = Path(__file__).parents[1]


def hour(text, folder, *options):
    command = [sys.executable, "-m", "benchmarks.gpu_hour", text, "--results", folder, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes((ROOT / "README.md").read_bytes())
    return path


@pytest.mark.slow
def test_at_toy_size_it_runs_and_goes_on_where_it_was_stopped(text, tmp_path):
    folder = tmp_path / "results"
    first = hour(text, folder, "--toy")
    assert first.returncode == 0, first.stderr
    report = json.loads((folder / "report.json").read_text())
    seeds = sum(row.seeds for row in gpu_hour.ROWS)
    assert len(report["runs"]) == 2 * seeds
    assert "says nothing about CProp" in first.stdout
    kept, lost = folder / "pretraining-0-0.json", folder / "fine-tuning-3-0.json"
    before = kept.stat().st_mtime_ns, json.loads(lost.read_text())["curve"][-1]["held_out"]
    lost.unlink()
    assert hour(text, folder, "--toy").returncode == 0
    assert (kept.stat().st_mtime_ns, json.loads(lost.read_text())["curve"][-1]["held_out"]) == before


def results(**losses):
    return [
        {"phase": phase, "row": row, "curve": [{"held_out": loss}]}
        for phase in (gpu_hour.PRETRAINING, gpu_hour.FINE_TUNING)
        for row, values in losses.items()
        for loss in values
    ]


@pytest.mark.parametrize(
    ("ours", "word"), [([2.9, 2.9], "ahead of"), ([2.99, 2.99], "level with"), ([3.1, 3.1], "behind")]
)
def test_less_than_twice_the_yardstick_is_a_tie(ours, word):
    said = gpu_hour.verdicts(results(AdamW=[3.0, 3.01], CProp=ours))
    assert len(said) == 2
    assert all(f"CProp is {word} AdamW" in line and "yardstick 0.0100" in line for line in said)


def test_a_run_that_diverged_is_behind():
    assert "is behind" in gpu_hour.verdicts(results(AdamW=[3.0, 3.01], CProp=[float("inf")]))[0]


def test_the_model_has_a_hundred_million_parameters():
    import torch

    with torch.device("meta"):
        model = gpu_hour.LanguageModel(gpu_hour.Size())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(100e6, rel=0.02)


@pytest.mark.slow
def test_without_a_gpu_and_with_a_short_text_it_says_what_to_do(text, tmp_path):
    assert "on a CPU this would take weeks. --toy shows" in hour(text, tmp_path).stderr
    text.write_bytes(b"short")
    assert "has 5 bytes: take a text with at least 100 MB, or --toy" in hour(text, tmp_path, "--toy").stderr
