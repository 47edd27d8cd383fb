"""Which modules belong to a task, and that they run as they were read."""

import hashlib
import pickle
import re
import subprocess
import sys
import textwrap
import traceback

import pytest

from cprop_lab import source, workloads
from cprop_lab.run.specification import Specification

FILES = {
    "pond/__init__.py": "",
    "pond/task.py": """
        import torch
        import reeds.grass
        from cprop_lab import Task
        from . import duck
        from .deep.water import LEVEL

        class Pond(Task):
            def data(self):
                from lazily import late
                return late

            def divide(self):
                return 1 / 0
    """,
    "pond/duck.py": "SOUND = 'quack'",
    "pond/deep/water.py": "from ..duck import SOUND\nLEVEL = 3",
    "pond/unused.py": "",
    "reeds/grass.py": "import numpy",  # a folder without __init__.py
    "lazily.py": "late = 'yes'",
}


OWN = {"pond", "pond.task", "pond.duck", "pond.deep", "pond.deep.water", "reeds", "reeds.grass", "lazily"}


def forget():
    """As in a new process."""
    for known in (sys.modules, source._imported.modules, source._read):
        for name in [name for name in known if name.partition(".")[0] in ("pond", "reeds", "lazily")]:
            del known[name]


@pytest.fixture
def pond(tmp_path, monkeypatch):
    """A package, and modules beside it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()


def test_modules_of_your_own_are_found_by_what_is_imported(pond):
    assert set(source.read("pond.task")) == OWN


def test_of_a_task_in_an_installed_package_it_is_that_package(pond, monkeypatch):
    monkeypatch.setattr(source, "INSTALLED", {*source.INSTALLED, pond})
    assert set(source.read("pond.task")) == {name for name in OWN if name.startswith("pond")}


@pytest.mark.parametrize(
    ("edited", "matters"),
    [("pond/__init__.py", True), ("pond/deep/water.py", True), ("lazily.py", True), ("pond/unused.py", False)],
)
def test_an_edit_of_any_of_them_is_another_identity(pond, edited, matters):
    before = source.digest("pond.task")
    forget()
    (pond / edited).write_text("SOUND = LEVEL = late = 1")
    assert (source.digest("pond.task") != before) == matters


def test_a_task_in_one_file_has_the_digest_of_that_file(pond):
    assert source.digest("lazily") == hashlib.sha256(FILES["lazily.py"].encode()).hexdigest()[:16]


def test_what_is_imported_is_what_was_read(pond):
    """And not what the file has become; a traceback quotes the line that ran."""
    before = source.digest("pond.task")
    (pond / "lazily.py").write_text("raise AssertionError\n")
    (pond / "pond" / "task.py").write_text("raise AssertionError\n" * 20)
    task = workloads.own("pond.task:Pond")()
    assert task.data() == "yes"
    assert sys.modules["lazily"].__file__ == str(pond / "lazily.py")
    assert source.digest("pond.task") == before
    with pytest.raises(ZeroDivisionError) as error:
        task.divide()
    assert error.traceback[-1].frame.code.path == pond / "pond" / "task.py"
    assert "return 1 / 0" in "".join(traceback.format_tb(error.tb))


ELSEWHERE = """
import pickle, sys
from cprop_lab import source, workloads
source.adopt(pickle.load(sys.stdin.buffer))
print(workloads.own("pond.task:Pond")().data(), workloads.code("pond.task:Pond"))
"""


@pytest.mark.slow
def test_another_process_needs_none_of_the_files(pond, tmp_path_factory):
    shipped = pickle.dumps(workloads.sources(["pond.task:Pond", "fmnist-fc"]))
    elsewhere = [sys.executable, "-c", ELSEWHERE]
    said = subprocess.check_output(elsewhere, input=shipped, cwd=tmp_path_factory.mktemp("elsewhere"), timeout=500)
    assert said.decode().split() == ["yes", workloads.code("pond.task:Pond")]


def test_a_process_that_holds_another_version_refuses(pond):
    old = workloads.sources(["pond.task:Pond"])
    forget()
    (pond / "pond" / "duck.py").write_text("SOUND = 'moo'")
    workloads.own("pond.task:Pond")
    with pytest.raises(RuntimeError, match=r"module 'pond.duck' of task pond.task was imported here before"):
        source.adopt(old)


@pytest.mark.slow
def test_a_node_that_would_run_other_code_than_the_driver_refuses(tmp_path):
    from cprop_lab.engine import pool
    from cprop_lab.engine.limits import Limits

    one = Specification("tasks:Blobs", "sgd", lr=0.1)
    task = workloads.sources([one.workload])
    error, _ = pool.work("0123", one.to_json(), task, str(tmp_path), mark="", limits=Limits())
    assert re.search(r"run 0123 would be run \w{16} on this node.*install the same on all", error)
