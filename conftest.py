"""Which tests run when, and on which device.

``slow`` ones do not run in ``pytest -m "not slow"``, ``nightly`` ones only if asked for. With ``--device cuda``, those
run that put their parameters there; with ``meta``, as far as they get without values.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Several tests run at once. With more than one thread each, they would spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in other processes

SOURCES = [Path(__file__).parent / folder for folder in ("src", "cprop-lab/src", "evidence", "research")]

ON_DEVICE = {
    *("test_equivalence", "test_execution", "test_resume", "test_storage", "test_contract", "test_wrapper"),
    *("test_checkpoints", "test_gradients", "test_schedulers"),
}
"""Modules whose parameters are on the chosen device; the others test files, processes, frameworks and pages."""

VALUES_ALONE = {"test_equivalence", "test_resume"}
"""Modules that train for long and then compare values. On meta they would end there, after minutes: an operation on
meta is a decomposition in Python, and takes a millisecond."""

settings.register_profile("default", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the library's parameters are: cpu, cuda, xpu, mps, meta")


def pytest_configure(config):
    os.environ["CPROP_TEST_DEVICE"] = config.getoption("device")  # tests/table.py reads it, in every process


def pytest_ignore_collect(collection_path):
    """A module without an example is not imported: some import frameworks that take seconds."""
    ours = (
        collection_path.suffix == ".py"
        and set(SOURCES) & set(collection_path.parents)
        and not collection_path.name.startswith("test_")
    )
    return True if ours and ">>>" not in collection_path.read_text() else None


def compiles(item):
    """Whether a parameter of a test chooses compiled kernels."""
    return hasattr(item, "callspec") and ("fused" in item.callspec.id or item.callspec.params.get("fused") is True)


@pytest.hookimpl(tryfirst=True)  # before pytest itself selects by marks
def pytest_collection_modifyitems(config, items):
    device = config.getoption("device")
    for item in items:
        if compiles(item):
            item.add_marker("slow")
        if device != "cpu" and item.path.stem not in ON_DEVICE:
            item.add_marker(pytest.mark.skip(reason=f"does not use --device {device}"))
        if device == "meta" and item.path.stem in VALUES_ALONE:
            item.add_marker(pytest.mark.skip(reason="compares values, and meta tensors have none"))
    if "nightly" not in config.getoption("markexpr"):
        repeats = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.fixture(autouse=True)
def lists_everywhere(monkeypatch):
    """``foreach=True`` runs a for-loop on a CPU; here it runs on lists, as on a GPU."""
    from cprop.execution import foreach

    monkeypatch.setattr(foreach, "LOOPED", frozenset())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test ends where it first asks for what is not there: on meta for a value, in an older torch for a kernel."""
    from cprop.execution.inductor import unavailable

    try:
        return (yield)
    except Exception as error:
        if (reason := unavailable()) and reason in str(error):  # perhaps the output of a process
            pytest.skip(reason)
        if not isinstance(error, NotImplementedError | RuntimeError):
            raise
        if item.config.getoption("device") == "meta" and "meta" in str(error).lower():
            pytest.skip(f"meta tensors have no values: {str(error).partition(chr(10))[0][:100]}")
        raise
