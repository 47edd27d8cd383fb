"""The recipe for Slurm on a real one: its daemons as two nodes on this machine, in a network of their own.

A network namespace has nothing but a loopback interface, so whatever listens there can be reached from nowhere else.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import PYTHONPATH

from cprop_lab.store import Store

ROOT = Path(__file__).parents[2]
missing = [
    name
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "ip")
    if shutil.which(name) is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {missing} (Debian: apt install slurm-wlm munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons start jobs as other users, which only root can"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=one NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=two NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=one,two Default=YES State=UP
"""


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.5)


# Slurm asks for an address that is not 127.0.0.1.
NETWORK = "ip link set lo up && ip address add 192.0.2.1/32 dev lo && echo up && exec cat"


@pytest.fixture
def inside():
    """Words before a command that run it in a network of its own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["unshare", "--net", "sh", "-c", NETWORK], **pipes) as holder:
        assert holder.stdout.readline() == "up\n"
        yield ["nsenter", "--net", f"--target={holder.pid}"]
        holder.stdin.close()


@pytest.fixture
def slurm(tmp_path, inside):
    """The environment of a user of a Slurm with two nodes."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool-one", "spool-two"):
        (folder / name).mkdir(parents=True)
    *ports, ray = free_ports(4)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=ports))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "HEAD_IP": "127.0.0.1",
        "HEAD_PORT": str(ray),
    }
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munge = ["munged", "--foreground", "--force", f"--key-file={folder / 'munge.key'}"]
    munge += [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
    with ExitStack() as stack:
        for daemon in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"], ["slurmd", "-D", "-N", "two"]):
            log = stack.enter_context((folder / f"{'-'.join(daemon[::3])}.log".replace("/", "_")).open("w"))
            process = subprocess.Popen([*inside, *daemon], env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_for(files["socket"].exists, 60, lambda: files["log"].read_text())

        def nodes():
            command = [*inside, "sinfo", "-h", "-o", "%t %D"]
            return subprocess.run(command, env=environment, check=False, capture_output=True, text=True).stdout

        wait_for(lambda: nodes() == "idle 2\n", 120, nodes)
        yield environment
        subprocess.run([*inside, "scancel", "--user=root", "--full", "--signal=KILL"], env=environment, check=False)
        wait_for(lambda: nodes() == "idle 2\n", 120, nodes)


def test_a_requeued_job_on_two_nodes_continues(tmp_path, slurm, inside):
    def told(*words):
        return subprocess.check_output([*inside, *words], env=slurm, cwd=Path(__file__).parent, text=True)

    output, store = tmp_path / "output.txt", Store(tmp_path / "store")
    words = ["compare", "tasks:Slow", "--optimizers", "rmsprop", "--iterations", "800", "--selection-iterations", "50"]
    words += ["--seeds", "2", "--eager", "--storage", tmp_path / "store", "--out", tmp_path / "figure.png"]
    submitted = told("sbatch", "--open-mode=append", f"--output={output}", ROOT / "examples" / "slurm.sh", *words)
    job = re.search(r"\d+", submitted)[0]
    wait_for(lambda: len(store.finished()) >= 2, 600, output.read_text)
    before = store.finished()
    told("scontrol", "requeue", job)
    wait_for(lambda: not told("squeue", "-h", "-j", job).strip(), 900, output.read_text)
    said = re.sub(r"\s+", " ", output.read_text())
    assert "CANCELLED" in said  # the first time
    assert "RMSProp + CProp" in said, said
    assert "already finished and are reused" in said
    assert len(store.finished()) > len(before)
    assert said.count("Ray runtime started.") == 4, said  # two nodes, twice
