"""``python -m cprop.check`` finds no fault here, and finds those that are there."""

import json
import subprocess
import sys

import pytest
import torch

import cprop
from cprop import check
from cprop.execution.inductor import unavailable

CPU = torch.device("cpu")


def test_quick_checks_pass_here():
    results = check.run(CPU, quick=True)
    assert {result.verdict for result in results} == {"ok", "skipped"}
    assert all("cpu" in result.detail for result in results if result.verdict == "skipped")
    assert not any("fused" in result.check for result in results)


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_all_checks_pass_here():
    results = {result.check: result for result in check.run(CPU)}
    assert results["Algorithm 1, fused"].verdict == results["resumes, fused"].verdict == "ok"
    assert {result.verdict for result in results.values()} == {"ok", "skipped"}


def test_what_this_torch_cannot_do_is_no_fault(monkeypatch):
    monkeypatch.delattr(torch._inductor, "standalone_compile", raising=False)
    results = {result.check: result for result in check.run(CPU)}
    assert results["Algorithm 1, fused"].verdict == "skipped"
    assert "or set fused=False" in results["Algorithm 1, fused"].detail
    assert {result.verdict for result in results.values()} == {"ok", "skipped"}


def failed(results):
    return {result.check for result in results if result.verdict == "failed"}


def test_a_wrong_scale_is_found(monkeypatch):
    scales = cprop.CPropSGD.scales
    monkeypatch.setattr(cprop.CPropSGD, "scales", lambda self: ((p, 0.999 * scale) for p, scale in scales(self)))
    assert failed(check.run(CPU, quick=True)) == {"Algorithm 1, for-loop", "Algorithm 1, foreach"}


def test_a_state_that_is_not_restored_is_found(monkeypatch):
    monkeypatch.setattr(cprop.CPropAdam, "load_state_dict", lambda self, state_dict: None)
    assert failed(check.run(CPU, quick=True)) == {"resumes, for-loop", "resumes, foreach", "resumes, bfloat16 state"}


def test_an_exception_is_a_fault_and_not_the_end(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of order\nand more")

    monkeypatch.setattr(check, "capturable", broken)
    (result,) = (result for result in check.run(CPU, quick=True) if result.verdict == "failed")
    assert result.detail == "RuntimeError: out of order"


def test_the_program_prints_a_table_and_writes_a_report(tmp_path, monkeypatch, capsys):
    report = tmp_path / "check.json"
    assert check.main(["--quick", "--device", "cpu", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert f"cprop {cprop.__version__} · torch {torch.__version__}" in printed
    assert "  ok       Algorithm 1, for-loop" in printed
    assert "CPropAdamW" in printed
    written = json.loads(report.read_text())
    assert written["checks"][0]["verdict"] == "ok"
    costs = {cost["name"]: cost for cost in written["costs"]["cpu"]}
    assert (costs["torch Adam"]["state_bytes"], costs["CPropAdam"]["state_bytes"]) == (8.0, 12.0)
    passed, skipped = ([one for one in written["checks"] if one["verdict"] == verdict] for verdict in ("ok", "skipped"))
    assert f"\n{len(passed)} checks passed, {len(skipped)} skipped\n" in printed
    assert len(passed) + len(skipped) == len(written["checks"])
    assert "\n  skipped: captured graph (cpu has no graphs)\n" in printed
    alike = "no synchronization, for-loop; no synchronization, foreach"
    assert f"\n  skipped: {alike} (torch cannot detect synchronization on cpu)\n" in printed
    monkeypatch.setattr(check, "SCALE_LIMIT", 0.0)
    assert check.main(["--quick", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "  failed   Algorithm 1, for-loop" in printed
    assert f"\n{len(passed) - 2} checks passed, 2 failed, {len(skipped)} skipped; please report this\n" in printed


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named():
    call = [sys.executable, "-m", "cprop.check", "--quick", "--device", "cuda"]
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    ended = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "cuda is not available here" in ended.stderr
    assert "choose one of cpu" in ended.stderr
