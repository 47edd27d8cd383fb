"""Many runs: in this process, and on a real Ray whose processes are killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH

from cprop_lab.engine.engine import Engine
from cprop_lab.engine.leases import Leases
from cprop_lab.engine.limits import Limits
from cprop_lab.engine.progress import Progress
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import StorageError, Store
from cprop_lab.store.builds import MixedBuildsError, mixed

TESTS = Path(__file__).parent
SLOW = Specification(
    "tasks:Slow", "cprop-adam", lr=1e-2, iterations=1000, evaluate_every=100, settings={"fused": False}
)
FAILING = SLOW.replace(workload="tasks:Failing")

# The driver of a sweep, as a process of its own that can be killed; on a Ray of several nodes, if asked for.
DRIVER = """
import json, os, sys
from cprop_lab.engine import RunsFailedError
from cprop_lab.engine.engine import RAY, Engine, alone
from cprop_lab.engine.limits import Limits
from cprop_lab.store import Store
from cprop_lab.run.specification import Specification

runs, address = [Specification.from_json(text) for text in json.loads(sys.argv[2])], None
if nodes := int(sys.argv[3]):
    os.environ.update(RAY | alone())
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(nodes):
        cluster.add_node(num_cpus=1)
    address = cluster.address
try:
    Engine(Store(sys.argv[1]), address=address, limits=Limits(checkpoint_seconds=0.5, retries=1)).run(runs)
except RunsFailedError as error:
    print(error)
"""


@contextmanager
def started(folder, runs, nodes=0):
    failing = FAILING.replace(options={"log": str(folder / "started.log")})
    specifications = json.dumps([run.to_json() for run in [*runs, failing]])
    command = [sys.executable, "-c", DRIVER, str(folder), specifications, str(nodes)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with (
        (folder / "driver.log").open("w") as log,
        subprocess.Popen(command, cwd=TESTS, env=environment, stdout=log, stderr=subprocess.STDOUT) as driver,
    ):
        try:
            yield driver
        finally:
            driver.kill()


def parent(process):
    """The process that started it."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def below(process):
    """A process and all that it has started, directly or not."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            children.setdefault(parent(entry.name), []).append(int(entry.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def command(process):
    """What a process was started with, or has named itself."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def trial_processes(driver):
    """The processes of Ray below a driver that execute a run: Ray names them after the task's function."""
    names = {process: command(process) for process in below(driver)}
    return [process for process, name in names.items() if name.startswith("ray::") and "work" in name]


def wait_for(condition, seconds, driver):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        assert driver.poll() is None
        time.sleep(0.1)
    raise AssertionError(f"nothing within {seconds} s")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute, and on a busy machine Ray alone takes several to start
def test_a_killed_node_and_a_killed_driver_leave_no_trace_in_the_results(tmp_path):
    """A killed run too: its processes end with their node."""
    checkpoints, gate = tmp_path / "checkpoints", tmp_path / "gate"
    gate.mkdir()
    runs = [SLOW.replace(workload="tasks:Guarded", options={"gate": str(gate)}, seed=seed) for seed in range(2)]
    with started(tmp_path, runs, nodes=2) as driver:
        wait_for(lambda: list(checkpoints.glob("[!.]*.pt")) if checkpoints.exists() else [], 500, driver)
        victim = wait_for(lambda: trial_processes(driver.pid), 100, driver)[0]
        # glibc reads its settings when a process starts: later ones would do nothing.
        assert b"MALLOC_MMAP_THRESHOLD_=" in Path(f"/proc/{victim}/environ").read_bytes()
        node = parent(victim)
        assert "raylet" in command(node)
        assert not any("Mailbox" in command(process) for process in below(node))  # it would be lost with the node
        os.kill(node, signal.SIGKILL)
        killed = time.time()
        # The other node ends its own run and goes on with the lost one: wait for a sign of that before the next blow.
        (gate / "pass").touch()
        (first,) = wait_for(Store(tmp_path).finished, 300, driver)
        (lost,) = {run_id(run) for run in runs} - {first}
        checkpoint = checkpoints / f"{lost}.pt"
        wait_for(lambda: checkpoint.exists() and checkpoint.stat().st_mtime > killed, 300, driver)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(300)
        assert Store(tmp_path).finished() == {first}
    shutil.rmtree(tmp_path / "leases")  # they expire after a minute, as another test shows
    gate.rmdir()
    log = tmp_path / "started.log"
    log.write_text("")
    with started(tmp_path, runs) as second:
        assert second.wait(900) == 0
    said = (tmp_path / "driver.log").read_text()
    assert re.search(
        r"1 of \d runs failed; the first, tasks:Failing with cprop-adam: *\n"
        r'  File ".*tasks.py", line \d+, in before_step\n    raise IndexError\("too far"\)\nIndexError: too far',
        said,
    )
    assert said.count("too far") == 2  # in the line that raises it, and in what that says
    # Once by the driver, which looks at a task before anything is started, and once by the run: it is not retried.
    assert log.read_text() == "started\nstarted\n"
    store = Store(tmp_path)
    assert sorted(store.finished()) == sorted(run_id(run) for run in runs)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"{run_id(run)}.arrow" for run in runs}
    left = {path.stem for path in checkpoints.glob("[!.]*")}
    assert not left & store.finished()  # the run that failed may have one, on a slow machine

    undisturbed = Engine(Store(tmp_path / "undisturbed"), executor="process").run(runs)
    for ours, theirs in zip(store.runs(map(run_id, runs)), undisturbed, strict=True):
        assert ours.curves.drop_columns(["seconds"]).equals(theirs.curves.drop_columns(["seconds"]))
        assert list(ours.column("step")) == list(range(0, 1001, 100))


EMPTY = """
import os, sys
from dataclasses import replace
from cprop_lab.engine.engine import RAY, Engine, alone
from cprop_lab.engine.progress import Progress
from cprop_lab.engine.limits import Limits
from cprop_lab.run.specification import Specification
from cprop_lab.store import Store

os.environ.update(RAY | alone())
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
run = Specification.from_json(sys.argv[2])


class Scene(Progress):
    worker, killed = None, False

    def waiting(self, what=""):
        if "workers" in what:
            print(what, flush=True)
            self.worker = cluster.add_node(num_cpus=1)

    def evaluated(self, specification, evaluation):
        if not self.killed and evaluation["step"]:
            self.killed = True
            cluster.remove_node(self.worker, allow_graceful=False)


scene = Scene()
limits = Limits(retries=9, checkpoint_seconds=0.1)
engine = Engine(Store(sys.argv[1]), address=cluster.address, limits=limits, progress=scene)
print(len(engine.run([run])), "finished", flush=True)
cluster.remove_node(scene.worker, allow_graceful=False)
engine.limits, engine.progress = replace(limits, wait_for_workers=0.05), Progress()
try:
    engine.run([run.replace(seed=1)])
except TimeoutError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cluster_without_any_worker_is_waited_for(tmp_path):
    """At the start, and after the only one was lost; but not for ever."""
    lines = said_by(EMPTY, tmp_path, SLOW.to_json()).splitlines()
    *waits, finished, ended = (line for line in lines if re.match("waiting|no worker|1 fin", line))  # and not Ray's own
    lacking = r"a run asks for 1 CPU cores and 0 GPUs, and no machine has more than 0 and 0"
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    line = rf"waiting for workers since {when}, until {when} \(--wait-for-workers MINUTES changes this\): {lacking}"
    assert len(waits) >= 2  # Ray gives up more nodes on a busy machine
    assert all(re.fullmatch(line, said) for said in waits), waits
    assert finished == "1 finished"
    assert re.fullmatch(rf"no worker for 0.05 minutes: {lacking}. Finished work is kept; start workers, .*", ended)


class Notes(Progress):
    """Writes down what an engine tells."""

    def __init__(self):
        self.said = []

    def begin(self, missing, reused):
        self.said.append(("begin", [specification.seed for specification in missing], reused))

    def evaluated(self, specification, row):
        self.said.append(("evaluated", specification.seed, row["step"]))

    def ended(self, specification):
        self.said.append(("ended", specification.seed))

    def failed(self, specification, error):
        self.said.append(("failed", specification.seed, error))

    def end(self):
        self.said.append(("end",))


QUICK = SLOW.replace(workload="tasks:Blobs", iterations=20, evaluate_every=10)


def test_in_this_process_what_is_finished_is_not_run_again(tmp_path):
    engine = Engine(Store(tmp_path), executor="process", progress=Notes())
    engine.run([QUICK])
    engine.progress.said.clear()
    runs = engine.run([QUICK.replace(seed=1), QUICK, QUICK])
    assert [run.specification.seed for run in runs] == [1, 0]
    rows = [("evaluated", 1, step) for step in (0, 10, 20)]
    assert engine.progress.said == [("begin", [1], 1), *rows, ("ended", 1), ("end",)]


@pytest.mark.parametrize("address", [None, "a cluster"])
def test_builds_of_torch_are_not_mixed(tmp_path, address):
    """What is finished may be of another build, but nothing is added to it; a cluster's build shows in what it ran."""
    more = QUICK.replace(seed=1)
    store = Store(tmp_path)
    rows = [{"step": i, "seconds": 0.0, "train_loss": 1.0, "test_loss": 1.0} for i in range(3)]
    store.write(QUICK, "finished", rows, {"torch": "2.6.0+another"})
    here = re.escape(torch.__version__)
    named = rf"would mix builds of torch.*: 1 with {here} and 1 with 2\.6\.0\+another .*--mix-builds"
    for together in (True, False):
        engine = Engine(store, executor="process", address=address, one_build=True)
        if not together:
            assert len(engine.run([QUICK])) == 1
        with pytest.raises(MixedBuildsError, match=named):
            engine.run([QUICK, more] if together else [more])
        assert store.finished() == {run_id(QUICK)} | ({run_id(more)} if address else set())
    assert len(Engine(store, executor="process").run([QUICK, more])) == 2
    assert re.match(
        rf"These runs mix builds of torch \(1 with {here} and 1 with 2\.6\.0\+another\)", mixed(store.runs())
    )
    assert mixed(store.runs([run_id(more)])) == ""


def test_an_error_of_a_task_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"there are 500 examples, and a batch takes 1000: give a smaller batch size"):
        Engine(Store(tmp_path), executor="process").run([QUICK.replace(batch_size=1000)])


# Several drivers.

SHARED = """
import sys
from cprop_lab.engine import leases
from cprop_lab.engine.engine import Engine
from cprop_lab.engine.limits import Limits
from cprop_lab.store import Store
from cprop_lab.run.specification import Specification

leases.EXPIRY = 4.0
run = Specification.from_json(sys.argv[2])
runs = [run.replace(seed=seed) for seed in range(int(sys.argv[3]))]
print("ready", flush=True)
sys.stdin.readline()
print(len(Engine(Store(sys.argv[1]), executor=sys.argv[4], limits=Limits(checkpoint_seconds=0.5)).run(runs)))
"""


@contextmanager
def drivers(folder, run, runs, executor="process"):
    """Two drivers of the same sweep, which start at the same time."""
    command = [sys.executable, "-c", SHARED, str(folder), run.to_json(), str(runs), executor]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen(command, cwd=TESTS, env=environment, **pipes)) for _ in "12"]
        for one in both:
            stack.callback(one.kill)
            assert one.stdout.readline() == "ready\n"
        for one in both:
            one.stdin.write("\n")
            one.stdin.flush()
        yield both


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("executor", ["process", pytest.param("ray", marks=pytest.mark.nightly)])
def test_two_drivers_share_the_work(tmp_path, executor):
    log = tmp_path / "started.log"
    run = SLOW.replace(workload="tasks:Logged", options={"log": str(log)}, iterations=100)
    with drivers(tmp_path / "store", run, 8, executor) as both:
        assert [one.communicate(timeout=1500)[0] for one in both] == ["8\n", "8\n"]
    started = [line for line in log.read_text().splitlines() if line.startswith("model")]
    # Each driver tries the task once before it starts anything.
    assert len(started) == 8 + 2
    assert len(set(started)) >= 2
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.suffix != ".arrow"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_runs_of_a_killed_driver_are_taken_over(tmp_path):
    with drivers(tmp_path, SLOW.replace(iterations=400), 4) as (victim, other):
        leases = tmp_path / "leases"
        wait_for(lambda: leases.exists() and len(list(leases.glob("[!.]*"))) == 2, 500, other)
        victim.kill()
        victim.wait()
        assert other.communicate(timeout=1500)[0] == "4\n"
    assert len(Store(tmp_path).runs()) == 4
    assert not list(leases.iterdir())


def test_a_lease_whose_clock_is_ahead_expires(tmp_path, monkeypatch):
    """It would last until our clock is where its driver's was."""
    monkeypatch.setattr("cprop_lab.engine.leases.EXPIRY", 0.2)
    (tmp_path / "leases").mkdir()
    ahead = time.time() + 3600
    for name in ("killed", "alive"):
        (tmp_path / "leases" / name).touch()
        os.utime(tmp_path / "leases" / name, (ahead, ahead))
    with Leases(Store(tmp_path)) as leases:
        assert not leases.take("killed")
        assert not leases.take("alive")
        time.sleep(0.3)
        os.utime(tmp_path / "leases" / "alive", (ahead + 1, ahead + 1))
        assert not leases.take("alive")
        assert leases.take("killed")


def test_what_killed_drivers_left_is_deleted_in_the_end(tmp_path):
    store = Store(tmp_path)
    left = {"leases": ("a" * 16, f".{'b' * 32}"), "marks": ("c" * 32,)}
    day = 24 * 3600
    for folder, names in left.items():
        (tmp_path / folder).mkdir()
        for name in names:
            for age, path in ((40 * day, tmp_path / folder / name), (0, tmp_path / folder / f"{name}-now")):
                path.touch()
                os.utime(path, (time.time() - age, time.time() - age))
    with store.marked() as mark, Leases(store):
        kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {mark, *(f"{folder}/{name}-now" for folder, names in left.items() for name in names)}


class Waits(Progress):
    """Notes what is waited for, and then has the other driver end."""

    def __init__(self, lease):
        self.lease, self.said = lease, []

    def waiting(self, what=""):
        self.said.append(what)
        if what:
            self.lease.unlink()


def test_waiting_for_another_command_is_told(tmp_path):
    (tmp_path / "leases").mkdir()
    lease = tmp_path / "leases" / run_id(QUICK)
    lease.touch()
    engine = Engine(Store(tmp_path), executor="process", progress=Waits(lease))
    assert len(engine.run([QUICK])) == 1
    assert engine.progress.said == [
        "waiting for runs that another command has leased; it loses them a minute after it was killed"
    ]


# Storage that cannot be used.


UNSHARED = """
import sys, time
from cprop_lab import workloads
from cprop_lab.engine.engine import Engine
from cprop_lab.engine.leases import Leases
from cprop_lab.run.identity import run_id
from cprop_lab.run.specification import Specification
from cprop_lab.store import StorageError, Store

run = Specification.from_json(sys.argv[2])
engine = Engine(Store(sys.argv[1] + "/driver"))
engine.run([run])  # starts Ray
from cprop_lab.engine.pool import Pool

# There is one machine here: its workers are given another folder than the one with the driver's mark.
with engine.store.marked() as mark, Leases(engine.store) as leases:
    pool = Pool(Store(sys.argv[1] + "/worker").address, mark, workloads.sources([run.workload]))
    begun = time.monotonic()
    try:
        pool.run({run_id(one): one for one in (run.replace(seed=seed) for seed in range(1, 9))}, leases)
    except StorageError as error:
        print(round(time.monotonic() - begun), error)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_that_does_not_share_the_storage_ends_the_sweep(tmp_path):
    (line,) = said_by(UNSHARED, tmp_path, QUICK.to_json()).splitlines()[-1:]
    found = re.fullmatch(
        r"(\d+) \S+ does not see the driver's files in file:.*worker: give --storage a folder .*", line
    )
    assert int(found[1]) < 60
    assert not list(tmp_path.glob("*/marks/*"))
    assert not (tmp_path / "worker").exists()


def said_by(program, *words):
    """What a process of its own prints."""
    command = [sys.executable, "-c", program, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return done.stdout


FULL = """
import resource, sys
from cprop_lab.engine.engine import Engine
from cprop_lab.store import Store
from cprop_lab.run.specification import Specification

# A limit of the operating system: what a process writes beyond it fails as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    Engine(Store(sys.argv[1]), executor="process").run([Specification.from_json(sys.argv[2])])
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_told_in_one_line_and_nothing_is_left(tmp_path):
    (line,) = said_by(FULL, tmp_path / "store", QUICK.to_json()).splitlines()
    assert re.search(rf"runs/{run_id(QUICK)}\.arrow cannot be written: File too large\. Make room, or give --st", line)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_read_only_storage_is_told_before_anything_is_started():
    with pytest.raises(
        StorageError, match=r"/sys/cprop/marks/\w+ cannot be written: .*\. Make room, or give --storage"
    ):
        Engine(Store("/sys/cprop")).run([QUICK])


def test_without_ray_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError,
        match=r"Ray is not installed .*: run pip install 'ray>=2\.52', or give --executor process",
    ):
        Engine(Store(tmp_path)).run([QUICK])


@pytest.mark.parametrize(("cpus", "gpus"), [(10_000, 0), (1, 1000.0)])
def test_resources_that_cannot_be_had_are_named_before_ray_is_started(tmp_path, cpus, gpus):
    asks = f"a run asks for {cpus} CPU cores and {gpus:g} GPUs"
    with pytest.raises(ValueError, match=rf"{asks}, and no machine has more than \d+ and \d+: lower --cpus or --gpus"):
        Engine(Store(tmp_path), limits=Limits(cpus, gpus)).run([QUICK])
