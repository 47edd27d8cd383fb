"""Runs as Ray tasks: never more of them with Ray than the cluster can hold twice, however many are to be run.

Ray places the tasks and says which were lost with their process or node; the store holds their results.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cprop_lab.engine.leases import ELSEWHERE, Leases
from cprop_lab.engine.limits import Limits
from cprop_lab.engine.progress import Progress
from cprop_lab.engine.train import train
from cprop_lab.registry import load
from cprop_lab.run.evaluation import Evaluation
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.source import Module, adopt, told
from cprop_lab.store import StorageError, Store

__all__ = ["Pool", "work"]

Sources = dict[str, dict[str, Module]]

SHOWN: Final = ("step", "train_loss", "seconds")
"""Of an evaluation, for the live table; curves go to the store."""
EVERY: Final = 1.0
"""Seconds between two rows that a run sends, and between two looks at those that came."""


class Mailbox:
    """An actor that holds the newest row of every run until the driver asks for them."""

    def __init__(self) -> None:
        self.rows: dict[str, Evaluation] = {}

    def put(self, name: str, row: Evaluation) -> None:
        """Replace a run's row."""
        self.rows[name] = row

    def empty(self) -> dict[str, Evaluation]:
        """What came since the last time."""
        rows, self.rows = self.rows, {}
        return rows


def work(
    name: str,
    text: str,
    sources: Sources,
    address: str,
    mark: str,
    limits: Limits,
    mailbox: Any = None,
) -> tuple[str, Evaluation | None]:
    """Train what the driver asks for, with the driver's code, in a process that Ray may reuse for the next run.

    Returns:
        An error to be told, if the run raised an exception: it would raise it again, so it is not retried. And its last
        row, which may be newer than the last that it sent.

    Raises:
        StorageError: if results cannot be stored, which ends the sweep: other runs could not store theirs either.
    """
    torch.set_num_threads(limits.cpus)
    sent, last = 0.0, None

    def send(row: Evaluation) -> None:
        nonlocal sent, last
        last = {**{key: row[key] for key in SHOWN}, "began": row["step"] if last is None else last["began"]}
        if mailbox is not None and time.monotonic() - sent >= EVERY:
            sent = time.monotonic()
            mailbox.put.remote(name, last)

    try:
        specification = Specification.from_json(text)
        adopt(sources)
        load(sources)
        if (here := run_id(specification)) != name:
            raise RuntimeError(
                f"run {name} would be run {here} on this node, which has another version of cprop-lab than the driver: "
                "install the same on all"
            )
        store = Store(address)
        store.look_for(mark)
        train(specification, store, send, limits.checkpoint_seconds)
    except StorageError:
        raise
    except Exception as error:
        return told(error), last
    return "", last


@dataclass
class Pool:
    """Runs what it is given on Ray, which must be initialised.

    Args:
        store: the address of the store.
        mark: the driver's file in it, which each run looks for.
        sources: the code of users' own tasks and optimizers.
        limits: what a run may take.
        progress: notified of how far it is.
    """

    store: str
    mark: str
    sources: Sources
    limits: Limits = field(default_factory=Limits)
    progress: Progress = field(default_factory=Progress)
    _without_since: float | None = field(default=None, init=False, repr=False)

    def slots(self) -> int:
        """How many runs the cluster can execute at once; while there are none, says what it waits for.

        Raises:
            TimeoutError: if there have been none for too long.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if fits := self.limits.fitting(nodes):
            if self._without_since is not None:
                self._without_since = None
                self.progress.waiting()
            return fits
        lacking, minutes = self.limits.lacking(nodes), self.limits.wait_for_workers
        if self._without_since is None:
            self._without_since = time.monotonic()
            since = datetime.now()
            until = since + timedelta(minutes=minutes)
            self.progress.waiting(
                f"waiting for workers since {since:%Y-%m-%d %H:%M:%S}, until {until:%Y-%m-%d %H:%M:%S} "
                f"(--wait-for-workers MINUTES changes this): {lacking}"
            )
        elif time.monotonic() - self._without_since > 60 * minutes:
            raise TimeoutError(
                f"no worker for {minutes:g} minutes: {lacking}. Finished work is kept; start workers, "
                "lower --cpus or --gpus, or give --wait-for-workers more minutes, and run the same command again"
            )
        return 0

    def run(self, runs: Mapping[str, Specification], leases: Leases) -> dict[Specification, str]:
        """Execute runs, by their id, and return the errors of those that failed for good.

        What another driver has leased is left to it, until it has ended or the lease has expired.

        Raises:
            StorageError: if a run cannot store its results.
            TimeoutError: if the cluster has had no machine that can hold a run for too long.
        """
        slots, looked = self.slots(), time.monotonic()
        sweep = Sweep(self, runs, leases)
        try:
            while sweep.unfinished:
                # Some even if no worker is there: an autoscaler starts workers for what is waiting.
                sweep.start(2 * max(1, slots))
                for task in sweep.over():
                    sweep.collect(task)
                if time.monotonic() - looked >= EVERY:
                    looked = time.monotonic()
                    slots = self.slots()  # a cluster grows and shrinks
                    sweep.ask_again(2 * max(1, slots))
                    sweep.show()
        finally:
            sweep.stop()
        return sweep.errors


class Sweep:
    """Runs on their way through Ray: each waits, flies, is another driver's, or has ended.

    Args:
        pool: how they are executed.
        runs: by their id.
        leases: which of them are this driver's.

    Attributes:
        waiting: to be started.
        flying: the run of each of Ray's tasks.
        theirs: leased by other drivers.
        lost: how often a run was lost with its process or node.
        errors: of those that failed for good.
    """

    def __init__(self, pool: Pool, runs: Mapping[str, Specification], leases: Leases) -> None:
        self.pool, self.runs, self.leases, self.progress = pool, runs, leases, pool.progress
        self.limits = limits = pool.limits
        self.waiting, self.theirs = deque(runs), deque[str]()
        self.flying: dict[Any, str] = {}
        self.lost = Counter[str]()
        self.errors: dict[Specification, str] = {}
        self._said: set[str] = set()
        self._store = Store(pool.store)
        # On the driver's own node: any other may be lost, and the mailbox with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox: Any = ray.remote(num_cpus=0)(Mailbox).options(scheduling_strategy=here).remote()
        # A process that has imported torch and mapped the data takes the next run, on a GPU too.
        self._task: Any = ray.remote(num_cpus=limits.cpus, num_gpus=limits.gpus, max_retries=0, max_calls=0)(work)
        self._sources = ray.put(pool.sources)

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do, or to wait for."""
        return bool(self.waiting or self.flying or self.theirs)

    def start(self, most: int) -> None:
        """Start waiting runs, until so many fly."""
        where = (self._sources, self.pool.store, self.pool.mark, self.limits, self._mailbox)
        while self.waiting and len(self.flying) < most:
            name = self.waiting.popleft()
            if self._mine(name):
                self.flying[self._task.remote(name, self.runs[name].to_json(), *where)] = name

    def _mine(self, name: str) -> bool:
        """Whether this driver is to execute a run; another may have it, or have executed it."""
        if not self.leases.take(name):
            self.theirs.append(name)
            return False
        if self.leases.folder is not None and self._store.find(name) is not None:
            self.leases.release(name)
            self.progress.ended(self.runs[name])
            return False
        return True

    def over(self) -> list[Any]:
        """A task that is over, if one is within a moment."""
        if self.flying:
            return ray.wait(list(self.flying), num_returns=1, timeout=EVERY)[0]
        if self.theirs and ELSEWHERE not in self._said:
            self._said.add(ELSEWHERE)
            self.progress.waiting(ELSEWHERE)
        time.sleep(EVERY)
        return []

    def collect(self, task: Any) -> None:
        """Take note of how a run ended.

        Raises:
            StorageError: if it could not store its results.
        """
        name = self.flying.pop(task)
        self.leases.release(name)
        try:
            error, row = ray.get(task)
        except RayTaskError as raised:
            raise raised.cause from None
        except RayError as killed:
            self._retry(name, str(killed).strip().splitlines()[0])
            return
        if row is not None:
            self.progress.evaluated(self.runs[name], row)
        if error:
            self.errors[self.runs[name]] = error
            self._tell(name, error)
        else:
            self.progress.ended(self.runs[name])

    def _retry(self, name: str, error: str) -> None:
        """Start a lost run again, before all others; unless it was lost too often."""
        self._tell(name, error)
        self.lost[name] += 1
        if self.lost[name] <= self.limits.retries:
            self.waiting.appendleft(name)
        else:
            self.errors[self.runs[name]] = error

    def _tell(self, name: str, error: str) -> None:
        """Tell of an error once, however many runs it ends."""
        line = error.splitlines()[-1]
        if line not in self._said:
            self._said.add(line)
            self.progress.failed(self.runs[name], line)

    def ask_again(self, most: int) -> None:
        """Let runs that other drivers had wait once more, as long as fewer than so many do."""
        while self.theirs and len(self.waiting) < most:
            self.waiting.append(self.theirs.popleft())

    def show(self) -> None:
        """Pass on how far the runs under way are."""
        under_way = set(self.flying.values())
        for name, row in ray.get(self._mailbox.empty.remote()).items():
            if name in under_way:
                self.progress.evaluated(self.runs[name], row)

    def stop(self) -> None:
        """Cancel what still flies: the user stopped it, or it cannot go on."""
        for task in self.flying:
            ray.cancel(task, force=True)
        ray.kill(self._mailbox)
