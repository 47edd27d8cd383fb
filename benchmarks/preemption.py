"""Kills a training run repeatedly, and compares its loss curve to an uninterrupted one.

    python -m benchmarks.preemption --kills 20 --json preemption.json

The run is ``examples/fsdp2_dcp.py``: a small language model under FSDP2. At random times a random rank
gets a SIGKILL, and the run restarts with another number of ranks. Sometimes its newest checkpoint is
damaged before that. The test checks that nothing is lost beyond the last checkpoint, that damaged
checkpoints are not loaded, and that the losses match those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2_dcp.py"
WORLDS = (1, 2, 4)


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(folder: Path, world: int, steps: int, every: int) -> list[subprocess.Popen[bytes]]:
    """Start the example, with one process per rank."""
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(EXAMPLE), str(folder), "--steps", str(steps), "--every", str(every)]
    with (folder.parent / f"{folder.name}.output").open("ab") as output:
        return [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=output, stderr=output
            )
            for rank in range(world)
        ]


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the remaining processes of a run: with a rank missing, they only wait."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines that the example has written; the last one may be truncated if its writer was killed."""
    lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").exists() else []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def curve(folder: Path) -> dict[int, float]:
    """The loss of every step; for a repeated step, the one that the run continued from."""
    return {entry["step"]: entry["loss"] for entry in log(folder) if entry.get("event") == "step"}


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.suffix != ".partial"), reverse=True)


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Truncate a file of a checkpoint, flip one of its bits, or remove it."""
    file = rng.choice(sorted(p for p in checkpoint.iterdir() if p.stat().st_size > 8))
    content = bytearray(file.read_bytes())
    kind = rng.choice(("cut short", "changed", "removed"))
    if kind == "cut short":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "changed":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    else:
        file.unlink()
    return f"{checkpoint.name}/{file.name} {kind}"


def undisturbed(folder: Path, world: int, steps: int, every: int, patience: float) -> dict[int, float]:
    """The loss curve of an uninterrupted run."""
    processes = start(folder, world, steps, every)
    try:
        for process in processes:
            if process.wait(patience) != 0:
                raise RuntimeError(f"the undisturbed run failed: see {folder}.output")
    finally:
        end(processes)
    return curve(folder)


def soak(
    folder: Path, kills: int, steps: int, every: int, seed: int, patience: float, damages: int = 3
) -> list[dict[str, Any]]:
    """Start and kill a run the given number of times, then let it finish; return what happened."""
    rng = random.Random(seed)
    events: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        found = checkpoints(folder)
        hurt: dict[str, str] = {}
        if len(found) > 1 and sum("damaged" in event for event in events) < damages:
            hurt = {"damaged": damage(found.pop(0), rng)}
        expected = int(found[0].name.removeprefix("step-")) if found else 0
        world = rng.choice(WORLDS)
        before = len(log(folder))
        processes = start(folder, world, steps, every)
        try:
            if len(events) >= kills:
                for process in processes:
                    if process.wait(patience) != 0:
                        raise RuntimeError(f"the run failed without being killed: see {folder}.output")
            else:
                wait_for_start(folder, before, processes, patience)
                time.sleep(rng.uniform(0.0, 3.0))
                victim = rng.randrange(world)
                if processes[victim].poll() is not None:
                    raise RuntimeError(f"the run ended before it could be killed: more steps, or see {folder}.output")
                processes[victim].send_signal(signal.SIGKILL)
                processes[victim].wait()
        finally:
            end(processes)
        started = next(entry for entry in log(folder)[before:] if entry.get("event") == "started")
        if started["step"] != expected:
            raise RuntimeError(f"went on from step {started['step']}, and the newest whole checkpoint was {expected}")
        last = max(curve(folder), default=0)
        events.append({"world": world, "from": started["step"], "to": last, **hurt})
        print(f"{len(events):3d}: {events[-1]}", flush=True)
        if log(folder)[-1].get("event") == "finished":
            return events


def wait_for_start(folder: Path, before: int, processes: list[subprocess.Popen[bytes]], patience: float) -> None:
    """Wait until a run has reported the step it resumes from."""
    deadline = time.monotonic() + patience
    while len(log(folder)) <= before:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"the run did not start: see {folder}.output")
        time.sleep(0.05)


def main() -> None:
    """Run the test from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened, and both loss curves")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print("the undisturbed run, on two ranks", flush=True)
        reference = undisturbed(root / "undisturbed", 2, arguments.steps, arguments.every, 1200)
        events = soak(root / "soak", arguments.kills, arguments.steps, arguments.every, arguments.seed, 600)
        disturbed = curve(root / "soak")
    difference = max(abs(disturbed[step] - loss) for step, loss in reference.items())
    print(f"{len(events) - 1} kills; largest difference of the loss at any of {len(reference)} steps: {difference:.1e}")
    if arguments.json:
        report = {"kills": len(events) - 1, "steps": arguments.steps, "seed": arguments.seed, "difference": difference}
        report |= {"events": events, "undisturbed": list(reference.values()), "disturbed": list(disturbed.values())}
        arguments.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
