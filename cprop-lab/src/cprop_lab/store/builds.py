"""The builds of torch that runs were made with: two builds may round differently, and then their curves differ.

A build is torch's version with its local part, as in ``2.13.0+cpu``. What this project changes in a run's numbers is
part of the run's id (``NUMERICS``, and a digest of the task's code), so runs of two such versions are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cprop_lab.store.rows import Run

__all__ = ["MixedBuildsError", "builds", "mixed", "only_one"]


class MixedBuildsError(RuntimeError):
    """Runs that are to be compared were made with different builds of torch."""


def builds(runs: Iterable[Run]) -> dict[str, str]:
    """The build of torch by run id; runs that do not say are left out."""
    return {run.run_id: str(run.provenance["torch"]) for run in runs if "torch" in run.provenance}


def _counted(of: Mapping[str, str]) -> str:
    """How many runs there are of each build; empty if there is only one."""
    counts = sorted(Counter(of.values()).items())
    return " and ".join(f"{runs} with {build}" for build, runs in counts) if len(counts) > 1 else ""


def mixed(runs: Iterable[Run]) -> str:
    """A remark on runs of several builds; empty if there is only one."""
    counts = _counted(builds(runs))
    return f"These runs mix builds of torch ({counts}), which may round differently." if counts else ""


def only_one(of: Mapping[str, str]) -> None:
    """Refuse to compare runs of several builds.

    Args:
        of: the build of each run, as :func:`builds` gives it.

    Raises:
        MixedBuildsError: if there are several.
    """
    if counts := _counted(of):
        raise MixedBuildsError(
            f"this comparison would mix builds of torch, which may round differently: {counts} (including runs that "
            "select learning rates). Give --storage another folder to run all of them with this torch, "
            "install the torch of the finished runs, or pass --mix-builds to compare them anyway"
        )
