"""Many runs: on Ray, on this machine or a cluster, or one after the other in this process.

A run keeps its checkpoint in the store, under its run id. So whatever is killed (a run, the driver, the cluster), the
same command resumes it, and one sweep can finish a run that another began.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from cprop_lab import source, workloads
from cprop_lab.engine import ResultsLostError, RunsFailedError, SweepInterruptedError
from cprop_lab.engine.check import check, trimmed
from cprop_lab.engine.leases import ELSEWHERE, Leases
from cprop_lab.engine.limits import Limits
from cprop_lab.engine.progress import Progress
from cprop_lab.engine.train import train
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import Run, StorageError, Store
from cprop_lab.store.builds import builds, only_one
from cprop_lab.workloads.data import ENVIRONMENT

__all__ = ["Engine"]

# Every step allocates the same large tensors again. Left to itself, glibc gives those above 32 MB back to the system
# each time, and a CPU spends a tenth of a large network's training on faulting them in page by page.
ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}

# Read by Ray when it is imported: no calls home.
RAY: Final = {"RAY_USAGE_STATS_ENABLED": "0"}


def alone() -> dict[str, str]:
    """For Ray on this machine: it listens on the loopback interface only, and requires a token.

    By default Ray listens on all interfaces. The switch that keeps it to this machine is named after the systems where
    it is the default; ``_node_ip_address`` changes which address a node announces, not where it listens.
    """
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _failed(errors: Mapping[Specification, str], of: Sized) -> RunsFailedError:
    """One error for all of them: runs of one task usually fail for the same reason."""
    first, message = next(iter(errors.items()))
    return RunsFailedError(
        f"{len(errors)} of {len(of)} runs failed; the first, {first.workload} with {first.optimizer}: {message}"
    )


@dataclass
class Engine:
    """Executes the runs that are not finished yet, and returns all of them.

    Args:
        store: where results are kept.
        executor: ``"ray"``, or ``"process"`` to execute them one after the other in this process, without Ray.
        address: of a Ray cluster; by default Ray is started on this machine.
        limits: what a run may take, and how often one that was lost is repeated.
        eager: whether to use no compiled steps.
        one_build: whether all runs, also of several calls, must be of one build of torch.
        progress: notified of how far it is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Engine(Store(folder), executor="process").run([])
        []
    """

    store: Store
    executor: Literal["ray", "process"] = "ray"
    address: str | None = None
    limits: Limits = field(default_factory=Limits)
    eager: bool = False
    one_build: bool = False
    progress: Progress = field(default_factory=Progress)
    _builds: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _checked: set[Specification] = field(default_factory=set, init=False, repr=False)

    def run(self, specifications: Iterable[Specification]) -> list[Run]:
        """Execute what is not finished, and return all runs in the given order.

        Raises:
            SweepInterruptedError: if the user stopped it.
            TaskError: if a task would fail in its first step; raised before anything is started.
            RunsFailedError: if a run raised an exception, or was lost more often than ``limits`` allow.
            StorageError: if the storage is full, read-only, or not shared by all machines.
            ResultsLostError: if runs ended and left no results.
            MixedBuildsError: if there must be one build of torch, and there are several; before anything is started,
                unless a cluster's differs.
            TimeoutError: if a cluster has had no machine that can hold a run for too long.
        """
        wanted = self.by_id(specifications)
        found = {run.run_id: run for run in self.store.runs(wanted)}
        missing = {name: specification for name, specification in wanted.items() if name not in found}
        # A cluster may have another torch than the driver.
        self._compare_builds(found.values(), {} if self.address else dict.fromkeys(missing, str(torch.__version__)))
        try:
            self._check(missing.values())
            self.progress.begin(list(missing.values()), len(wanted) - len(missing))
            if missing:
                with self.store.marked() as mark, Leases(self.store) as leases:
                    self._on_ray(missing, mark, leases) if self.executor == "ray" else self._in_process(missing, leases)
        except KeyboardInterrupt:
            raise SweepInterruptedError from None
        finally:
            self.progress.end()
        if missing:
            found |= {run.run_id: run for run in self.store.runs(missing)}
            self._compare_builds(found.values())
        if lacking := len(wanted) - len(found):
            raise ResultsLostError(
                f"{lacking} of {len(missing)} runs ended, and their results are not in {self.store.address}: give "
                "--storage a folder that all machines share, or an address such as s3://bucket/path"
            )
        return [found[name] for name in wanted]

    def _compare_builds(self, finished: Iterable[Run], expected: Mapping[str, str] | None = None) -> None:
        if self.one_build:
            self._builds |= builds(finished)
            only_one({**self._builds, **(expected or {})})

    def by_id(self, specifications: Iterable[Specification]) -> dict[str, Specification]:
        """What would be executed for these, by run id: the same runs, without compilation if ``eager``."""
        asked = map(Specification.eager, specifications) if self.eager else specifications
        return {run_id(specification): specification for specification in asked}

    def _check(self, specifications: Iterable[Specification]) -> None:
        """Check each task once; on a cluster only users' own, since the driver may lack the data of the others."""
        device = torch.device("cpu") if self.executor == "ray" and not self.limits.gpus else None
        for small in dict.fromkeys(map(trimmed, specifications)):
            if small not in self._checked and not (self.address and small.workload in workloads.WORKLOADS):
                check(small, device)
                torch.cuda.empty_cache()  # the runs may need it
                self._checked.add(small)

    def _in_process(self, missing: Mapping[str, Specification], leases: Leases) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.limits.cpus)
        waiting = deque(missing.items())
        refused = 0
        try:
            while waiting:
                name, specification = waiting.popleft()
                if not leases.take(name):
                    waiting.append((name, specification))  # another driver has it
                    refused += 1
                    if refused == len(waiting):
                        self.progress.waiting(ELSEWHERE)
                    time.sleep(0.5)
                    continue
                refused = 0
                try:
                    told = partial(self.progress.evaluated, specification)
                    train(specification, self.store, told, self.limits.checkpoint_seconds)
                except StorageError:
                    raise
                except Exception as error:
                    raise _failed({specification: source.told(error)}, missing) from error
                finally:
                    leases.release(name)
                self.progress.ended(specification)
        finally:
            torch.set_num_threads(threads)

    def _on_ray(self, missing: Mapping[str, Specification], mark: str, leases: Leases) -> None:
        for name, value in (RAY if self.address else RAY | alone()).items():
            os.environ.setdefault(name, value)
        if self.address is None:
            here = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
            if not self.limits.fitting([here]):
                raise ValueError(f"{self.limits.lacking([here])}: lower --cpus or --gpus")
        self.progress.waiting("starting Ray" if self.address is None else f"connecting to Ray at {self.address}")
        try:
            import ray
        except ImportError as error:
            raise ImportError(
                f"Ray is not installed ({error}): run pip install 'ray>=2.52', or give --executor process"
            ) from error
        from cprop_lab.engine.pool import Pool

        if not ray.is_initialized():
            self._start(ray)
        self.progress.waiting()
        sources = workloads.sources(run.workload for run in missing.values())
        pool = Pool(self.store.address, mark, sources, self.limits, self.progress)
        if errors := pool.run(missing, leases):
            raise _failed(errors, missing)

    def _start(self, ray: Any) -> None:
        """Start Ray, or connect to the cluster; it stays for the next set of runs, since a search has several."""
        environment = {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])}
        environment |= {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
        if ENVIRONMENT in os.environ:
            environment[ENVIRONMENT] = os.environ[ENVIRONMENT]
        options: dict[str, Any] = {"runtime_env": {"env_vars": environment}, "log_to_driver": False}
        if self.address is None:
            options |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=self.address or "local", logging_level=logging.ERROR, **options)
        # Ray takes SIGTERM for a crash and prints where it was.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Stop Ray, or disconnect from the cluster; this happens at the latest when Python exits."""
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
