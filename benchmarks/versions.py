"""The library's tests with other releases of torch: ``python -m benchmarks.versions 2.6 2.15 --environments FOLDER``.

Makes an environment per release, ``FOLDER/torch-2.6``, or reuses it; a torch with its CUDA libraries takes up to 7 GB.
There it runs the quick tests and ``python -m cprop.check``, which runs the fused kernels too, and replaces the row of
that release in ``benchmarks/results/versions.json``. ``--slow`` adds the slow tests of :data:`SLOW`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
SLOW = tuple(
    f"tests/test_{name}.py" for name in ("contract", "distributed", "distributed_checkpoint", "execution", "storage")
)
ABOUT = """
import json, platform, torch
from cprop.execution.inductor import unavailable
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "off": unavailable()}))
"""


def environment(release: str, folder: Path) -> Path:
    """The Python of an environment with a release of torch and what the library's tests need."""
    python = folder.absolute() / f"torch-{release}" / "bin" / "python"
    torch = "torch" if release == "newest" else f"torch=={release}.*"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--upgrade", torch, "-e", ".[test]"]
    subprocess.run(install, cwd=ROOT, check=True)
    return python


def tested(python: Path, *selection: str) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and why those."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", str(os.cpu_count()), "--tb", "short", "--show-capture", "no"]
        # Kernels of one release are not for another.
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels"}
        subprocess.run([*command, f"--junitxml={report}", *selection], cwd=ROOT, env=own, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    reasons = Counter(found.get("message", "") for case in cases for found in case.iter("skipped"))
    failed = sorted(case.get("name", "") for case in cases if {"failure", "error"} & {found.tag for found in case})
    skipped = reasons.total()
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": failed,
        "skipped": skipped,
        "why skipped": dict(sorted(reasons.items())),
    }


def checked(python: Path) -> dict[str, int]:
    """The verdicts of ``python -m cprop.check``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "check.json"
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels"}
        subprocess.run(
            [python, "-m", "cprop.check", "--device", "cpu", "--json", report], cwd=folder, env=own, check=False
        )
        return dict(Counter(check["verdict"] for check in json.loads(report.read_text())["checks"]))


def commit() -> str:
    """The commit that is tested; raises if the code differs from it."""
    changed = subprocess.check_output(
        ["git", "status", "--porcelain", "src", "tests", "conftest.py", "pyproject.toml"], cwd=ROOT, text=True
    )
    if changed:
        raise SystemExit(f"a row names a commit, and these files differ from it: commit them first\n{changed}")
    return subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True).strip()


def row(release: str, folder: Path, slow: bool) -> dict[str, Any]:
    """The results with one release of torch."""
    made = {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    made["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    python = environment(release, folder)
    about = json.loads(subprocess.check_output([python, "-c", ABOUT], cwd=ROOT))
    about["minor"] = ".".join(about["torch"].split(".")[:2])
    quick = tested(python, "-m", "not slow", "tests")
    found = {**made, **about, "quick": quick, "check": checked(python)}
    if slow:
        found["slow"] = {"commit": made["commit"], "files": SLOW, **tested(python, "-m", "slow", *SLOW)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the library with some releases of torch, and return an exit code: 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="+", metavar="RELEASE", help="minor releases of torch such as 2.8, or: newest"
    )
    parser.add_argument("--environments", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--slow", action="store_true", help=f"also the slow tests of {', '.join(SLOW)}")
    options = parser.parse_args(arguments)
    failed = 0
    for release in options.releases:
        new = row(release, options.environments, options.slow)
        rows = {old["minor"]: old for old in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
        slow_before = {key: value for key, value in rows.get(new["minor"], {}).items() if key == "slow"}
        rows[new["minor"]] = {**slow_before, **new}
        in_order = sorted(rows.values(), key=lambda each: [int(part) for part in each["minor"].split(".")])
        RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")
        failed += new["check"].get("failed", 0)
        failed += sum(len(new[kind]["failed"]) for kind in ("quick", "slow") if kind in new)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
