"""Which tests run when: ``slow`` ones not in ``pytest -m "not slow"``, ``nightly`` ones only if asked for."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Several tests run at once. With more than one thread each, they would spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in other processes

SOURCE = Path(__file__).parent / "src"

settings.register_profile("default", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_ignore_collect(collection_path):
    """A module without an example is not imported: some import frameworks that take seconds."""
    ours = collection_path.suffix == ".py" and SOURCE in collection_path.parents
    return True if ours and ">>>" not in collection_path.read_text() else None


def compiles(item):
    """Whether a parameter of a test chooses compiled kernels."""
    return hasattr(item, "callspec") and ("fused" in item.callspec.id or item.callspec.params.get("fused") is True)


@pytest.hookimpl(tryfirst=True)  # before pytest itself selects by marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        if compiles(item):
            item.add_marker("slow")
    if "nightly" not in config.getoption("markexpr"):
        repeats = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
