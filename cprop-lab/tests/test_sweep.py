"""One real sweep on Ray, watched from outside: what it listens on, whom it lets in, and which code it runs."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_engine import below, command, trial_processes, wait_for

from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # half a minute, and on a busy machine Ray alone takes several to start
]

# A step takes two milliseconds. Every loss is the helper's constant: a result says which code made it.
TASK = """
import time

import torch

from cprop_lab import Task
from helper import loss


class Mine(Task):
    def data(self):
        return (torch.zeros(64, 1),), (torch.zeros(64, 1),)

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        time.sleep(0.002)
        return loss(model(*batch))
"""
HELPER = "def loss(output):\n    return 0 * output.mean() + {}\n"

RUNS = [Specification("mine:Mine", "sgd", lr=0.1, iterations=1000, evaluate_every=500, seed=seed) for seed in range(5)]

SWEEP = """
import signal
import sys
from cprop_lab.engine.engine import Engine
from cprop_lab.store import Store
from cprop_lab.run.specification import Specification

signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM"))
runs = Engine(Store("results")).run(map(Specification.from_json, sys.argv[1:]))
print(*(run.run_id for run in runs))
"""

IDENTIFY = """
import sys
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
print(*(run_id(Specification.from_json(text)) for text in sys.argv[1:]))
"""


def python(*words, cwd, **changes):
    """A process of its own; without the tokens that this one may have."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.Popen(
        [sys.executable, *(word.to_json() if isinstance(word, Specification) else word for word in words)],
        cwd=cwd,
        env={**ours, "OMP_NUM_THREADS": "1", **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def ended(process):
    """End a process on the way out: after a failure, one would wait for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process):
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, out + errors
    return out.split()


def listening(processes):
    """The addresses on which processes wait for connections, by the process's command."""
    waiting = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = (bytes.fromhex(part) for part in local.split(":"))
            words = [address[i : i + 4][::-1] for i in range(0, len(address), 4)]  # each in the processor's order
            family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
            if state == "0A":
                waiting[f"socket:[{inode}]"] = socket.inet_ntop(family, b"".join(words)), int.from_bytes(port)
    found = []
    for process in processes:
        for file in Path("/proc").glob(f"{process}/fd/*"):
            with suppress(OSError):  # closed since
                found += [(process, *waiting[name]) for name in [str(file.readlink())] if name in waiting]
    return found


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Runs that are watched, and whose task is edited once the first of them has ended."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "mine.py").write_text(TASK)
    (folder / "helper.py").write_text(HELPER.format(1))
    finished = partial(folder.glob, "results/runs/*.arrow")
    before = said(python("-c", IDENTIFY, *RUNS, cwd=folder))
    with ended(python("-c", SWEEP, *RUNS, cwd=folder)) as driver:
        wait_for(lambda: list(finished()), 500, driver)
        (folder / "mine.py").write_text(TASK.replace("return loss(", "return 7 * loss("))
        (folder / "helper.py").write_text(HELPER.format(2))
        # What is started from now on would import the edited files.
        os.kill(trial_processes(driver.pid)[0], signal.SIGKILL)
        driver.terminate()
        in_time = len(list(finished())) < len(RUNS)
        doors = listening(below(driver.pid))
        (server,) = ((process, port) for process, _, port in doors if "gcs_server" in command(process))
        token = re.search(rb"RAY_AUTH_TOKEN=(\w+)", Path(f"/proc/{server[0]}/environ").read_bytes())[1].decode()
        guests = [
            python(
                *("-m", "ray.scripts.scripts", "health-check", "--address", f"127.0.0.1:{server[1]}"),
                cwd=folder,
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
                **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if known else {"RAY_AUTH_MODE": "disabled"},
            )
            for known in (True, False)
        ]
        answers = [(guest.communicate(timeout=500)[1], guest.returncode) for guest in guests]
        words = said(driver)  # also that a worker died
    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "tmp_path_factory"})


def test_all_results_are_of_the_code_as_it_was_at_the_start(sweep):
    assert sweep.in_time
    assert sweep.words[-len(RUNS) :] == sweep.before
    runs = Store(sweep.folder / "results").runs()
    assert {run.run_id for run in runs} == set(sweep.before)
    assert {loss for run in runs for loss in run.column("train_loss")} == {1.0}


def test_ray_leaves_sigterm_to_the_handler_that_was_there(sweep):
    """Ray's own takes it for a crash: it prints a stack and aborts."""
    assert sweep.words.count("SIGTERM") == 1


def test_edited_code_makes_other_runs(sweep):
    """Also where the edited file is one that the task's imports."""
    (sweep.folder / "mine.py").write_text(TASK)
    after = said(python("-c", IDENTIFY, *RUNS, cwd=sweep.folder))
    assert not set(after) & set(sweep.before)


def test_a_local_ray_listens_on_the_loopback_interface_alone(sweep):
    assert len(sweep.doors) > 5
    assert {address for _, address, _ in sweep.doors} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_who_does_not_know_the_token_is_refused(sweep):
    (welcome, code), (refused, other) = sweep.answers
    assert code == 0, welcome
    assert other != 0
    assert "AuthenticationError" in refused
