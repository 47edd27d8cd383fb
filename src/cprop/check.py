"""Checks that the library is right on this machine: ``python -m cprop.check``.

Needs torch alone. Every line of the table is a check with a verdict; the last ones are the time and memory of a step.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import cprop
from cprop.execution.inductor import unavailable
from cprop.execution.kernels import measure_in_kernels

__all__ = ["Result", "main", "run"]

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Any, because the constructors' types differ.
NATIVES: Final[Mapping[Any, Any]] = {
    torch.optim.SGD: cprop.CPropSGD,
    torch.optim.Adam: cprop.CPropAdam,
    torch.optim.AdamW: cprop.CPropAdamW,
    torch.optim.RMSprop: cprop.CPropRMSprop,
}
SHAPES: Final = ((), (7,), (33, 5), (300, 40))
STEPS: Final = 20
LR: Final = 0.01

SCALE_LIMIT: Final = 1e-5
"""For the error of a scale, from Algorithm 1 in float64."""
WEIGHT_LIMIT: Final = 1e-5
"""For the difference between two implementations, relative to a weight of one."""


class Result(NamedTuple):
    """One line of the table."""

    device: str
    check: str
    verdict: str
    detail: str


class SkippedError(Exception):
    """A check makes no sense on a device."""


class FailedError(Exception):
    """A check has found a fault."""


def settings(way: str) -> Mapping[str, Any]:
    """The settings of an implementation, if this torch has it."""
    if way == "fused" and (reason := unavailable()):
        raise SkippedError(reason)
    return WAYS[way]


# Inputs: the same on every device.


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Small parameters of several shapes."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def gradient(shape: Sequence[int], step: int) -> Tensor:
    """The gradient of a step: a mean that differs from element to element, and noise."""
    generator = torch.Generator().manual_seed(1000 + step)
    mean = torch.linspace(-1, 1, max(1, math.prod(shape))).view(tuple(shape))
    return mean + torch.randn(shape, generator=generator)


def train(optimizer: Optimizer, params: Sequence[nn.Parameter], steps: range = range(STEPS)) -> None:
    """Take some steps."""
    for step in steps:
        for p in params:
            p.grad = gradient(p.shape, step).to(p)
        optimizer.step()


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Between two lists of tensors, relative to one plus their size."""
    pairs = [(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in pairs)


def at_most(value: float, limit: float) -> str:
    """What is said of an error that must not exceed a limit."""
    said = f"largest error {value:.1e}, limit {limit:.0e}"
    if not value <= limit:  # NaN too
        raise FailedError(said)
    return said


# The checks. Each returns what it found, or raises one of the errors above.


def algorithm_1(device: torch.device, way: str) -> str:
    """Scales against Algorithm 1 of the paper, line by line in float64 on the CPU."""
    beta = 0.999
    params = parameters(device)
    optimizer = cprop.CPropSGD(params, lr=LR, **settings(way))
    train(optimizer, params)
    worst = 0.0
    for p, found in optimizer.scales():
        m = v = torch.zeros(p.shape, dtype=torch.float64)
        n = 0.0
        for step in range(STEPS):
            g = gradient(p.shape, step).double()
            m, v, n = beta * m + (1 - beta) * g, beta * v + (1 - beta) * g * g, 1 + beta * n
        m, v = m / ((1 - beta) * n), v / ((1 - beta) * n)
        sigma = ((v - m * m).clamp(min=0) / (n - 1)).sqrt()  # epsilon is zero
        expected = torch.erf(m.abs() / sigma / math.sqrt(2)).clamp(max=1)
        worst = max(worst, largest_difference([found], [expected]))
    return at_most(worst, SCALE_LIMIT)


def implementations_agree(device: torch.device, way: str) -> str:
    """Weights of two implementations of the same formula after some steps."""
    formula = measure_in_kernels("normal", device, torch.float32) if way == "fused" else "normal"
    worst = 0.0
    for cls in NATIVES.values():
        ours, theirs = parameters(device), parameters(device)
        train(cls(ours, lr=LR, **settings(way)), ours)
        train(cls(theirs, lr=LR, foreach=False, cprop_measure=formula), theirs)
        worst = max(worst, largest_difference(ours, theirs))
    return at_most(worst, WEIGHT_LIMIT)


def without_scaling_it_is_torchs(device: torch.device) -> str:
    """With infinite c, natives and the wrapper are torch's optimizers."""
    for plain, native in NATIVES.items():
        natives, wrapped, theirs = (parameters(device) for _ in range(3))
        train(native(natives, lr=LR, cprop_c=math.inf, foreach=False), natives)
        train(cprop.CProp(plain(wrapped, lr=LR, foreach=False), c=math.inf), wrapped)
        train(plain(theirs, lr=LR, foreach=False), theirs)
        for name, ours in ((native.__name__, natives), (f"CProp({plain.__name__})", wrapped)):
            if not all(map(torch.equal, ours, theirs)):
                raise FailedError(f"{name} differs by {largest_difference(ours, theirs):.1e}")
    return f"{', '.join(cls.__name__ for cls in NATIVES)}: to the bit"


def resumes(device: torch.device, way: str, state_dtype: str) -> str:
    """Saving, loading into a new optimizer and going on gives the same weights."""
    flags: dict[str, Any] = {"lr": LR, "cprop_state_dtype": state_dtype, **settings(way)}
    params = parameters(device)
    optimizer = cprop.CPropAdam(params, **flags)
    train(optimizer, params, range(10))
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    others = [nn.Parameter(p) for p in loaded["params"]]
    other = cprop.CPropAdam(others, **flags)
    other.load_state_dict(loaded["optimizer"])
    for those, of in ((params, optimizer), (others, other)):
        train(of, those, range(10, STEPS))
    if not all(map(torch.equal, params, others)):
        raise FailedError(f"differs by {largest_difference(params, others):.1e}")
    return "to the bit"


def capturable(device: torch.device) -> str:
    """With counters on the device, as a captured graph and ``torch.compile`` need it."""
    ours, theirs = parameters(device), parameters(device)
    train(cprop.CPropAdam(ours, lr=torch.tensor(LR, device=device), capturable=True), ours)
    train(cprop.CPropAdam(theirs, lr=LR), theirs)
    return at_most(largest_difference(ours, theirs), WEIGHT_LIMIT)


def captured_graph(device: torch.device) -> str:
    """A step replayed from a CUDA graph."""
    if device.type != "cuda":
        raise SkippedError(f"{device.type} has no graphs")
    ours, theirs = parameters(device), parameters(device)
    optimizer = cprop.CPropAdam(ours, lr=torch.tensor(LR, device=device), capturable=True)
    warm = 3
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        train(optimizer, ours, range(warm))
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()  # recorded, not executed
    for step in range(warm, STEPS):
        for p in ours:
            assert p.grad is not None
            p.grad.copy_(gradient(p.shape, step))
        graph.replay()
    train(cprop.CPropAdam(theirs, lr=LR), theirs)
    return at_most(largest_difference(ours, theirs), WEIGHT_LIMIT)


def no_synchronization(device: torch.device, way: str) -> str:
    """A step never waits for the device; torch itself raises an error if it does."""
    if device.type != "cuda":
        raise SkippedError(f"torch cannot detect synchronization on {device.type}")
    params = parameters(device)
    optimizer = cprop.CPropAdam(params, lr=LR, **settings(way))
    train(optimizer, params, range(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    except RuntimeError as error:
        raise FailedError(f"a step waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none in a step"


def checks(quick: bool) -> Iterator[tuple[str, Callable[[torch.device], str]]]:
    """All checks, by name."""
    ways = [way for way in WAYS if not (quick and way == "fused")]
    for way in ways:
        yield f"Algorithm 1, {way}", partial(algorithm_1, way=way)
    for way in ways[1:]:
        yield f"{way} and for-loop agree", partial(implementations_agree, way=way)
    yield "c = inf is torch's optimizer", without_scaling_it_is_torchs
    for way in ways:
        yield f"resumes, {way}", partial(resumes, way=way, state_dtype="float32")
    yield "resumes, bfloat16 state", partial(resumes, way="for-loop", state_dtype="bfloat16")
    yield "capturable", capturable
    yield "captured graph", captured_graph
    for way in ways:
        yield f"no synchronization, {way}", partial(no_synchronization, way=way)


# The time and memory of a step.


class Cost(NamedTuple):
    """What a step costs.

    Args:
        name: of the optimizer.
        milliseconds: the median of some steps.
        ratio: relative to torch's fused Adam, or its default one where that has no fused implementation.
        state_bytes: per parameter.
    """

    name: str
    milliseconds: float
    ratio: float
    state_bytes: float


def costs(device: torch.device, quick: bool) -> list[Cost]:
    """Steps of torch's optimizers and ours on the same parameters, in turns."""
    params = [nn.Parameter(torch.randn(512, 512, device=device)) for _ in range(4 if quick else 16)]
    for p in params:
        p.grad = torch.randn_like(p)
    built: dict[str, Optimizer] = {}
    for plain in (torch.optim.Adam, torch.optim.AdamW):
        for flags in ({},) if quick else ({}, WAYS["fused"]):
            for of, cls in (("torch ", plain), ("", NATIVES[plain])):
                try:
                    optimizer: Optimizer = cls(params, lr=1e-9, **flags)
                    optimizer.step()
                except (RuntimeError, ValueError, NotImplementedError):  # no fused implementation for this device
                    continue
                built[of + cls.__name__ + ", fused" * bool(flags)] = optimizer
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(9):
        for name, optimizer in built.items():
            _wait(device)
            start = time.perf_counter()
            optimizer.step()
            _wait(device)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    reference = medians.get("torch Adam, fused", medians["torch Adam"])
    number = sum(p.numel() for p in params)
    return [
        Cost(name, medians[name], medians[name] / reference, _state_bytes(optimizer) / number)
        for name, optimizer in built.items()
    ]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _state_bytes(optimizer: Optimizer) -> int:
    """Of all state but counters."""
    tensors = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim)
    return sum(x.numel() * x.element_size() for x in tensors)


# The program.


def devices() -> list[torch.device]:
    """The CPU, and whatever accelerator torch finds."""
    kinds = [
        name for name in ("cuda", "xpu", "mps") if getattr(torch, name, None) and getattr(torch, name).is_available()
    ]
    return [torch.device(kind) for kind in ("cpu", *kinds)]


def run(device: torch.device, quick: bool = False, said: Callable[[Result], object] = lambda _: None) -> list[Result]:
    """Run all checks on a device.

    Args:
        device: where.
        quick: whether to leave out what compiles.
        said: called with every result as soon as it is there.

    Example:
        >>> results = run(torch.device("cpu"), quick=True)
        >>> sorted({result.verdict for result in results})
        ['ok', 'skipped']
    """
    results = []
    for name, check in checks(quick):
        try:
            verdict, detail = "ok", check(device)
        except SkippedError as reason:
            verdict, detail = "skipped", str(reason)
        except FailedError as fault:
            verdict, detail = "failed", str(fault)
        except Exception as error:
            verdict, detail = "failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        results.append(Result(str(device), name, verdict, detail))
        said(results[-1])
    return results


def machine(device: torch.device) -> str:
    """What a device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the devices of this machine, print a table, and return an exit code: 0 if nothing failed."""
    parser = argparse.ArgumentParser("python -m cprop.check", description="Is CProp right on this machine?")
    parser.add_argument("--device", help="only this one, for example cuda:1 (default: the CPU and every accelerator)")
    parser.add_argument("--quick", action="store_true", help="leave out the fused implementation, which compiles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file, for a report")
    options = parser.parse_args(arguments)
    chosen = devices()
    if options.device:
        wanted = torch.device(options.device)
        if wanted.type not in {device.type for device in chosen}:
            found = ", ".join(map(str, chosen))
            parser.error(f"{options.device} is not available here: choose one of {found}, or install a torch for it")
        chosen = [wanted]
    about = {"cprop": cprop.__version__, "torch": torch.__version__, "python": platform.python_version()}
    about |= {"system": f"{platform.system()} {platform.machine()}"}
    print(" · ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    results: list[Result] = []
    tables: dict[str, list[Cost]] = {}
    for device in chosen:
        print(f"\n{device} ({machine(device)})" + "; compiling takes some seconds" * (not options.quick), flush=True)
        results += run(device, options.quick, lambda result: print(_line(result), flush=True))
        tables[str(device)] = costs(device, options.quick)
        print(f"\n  {'a step of':22} {'ms':>8} {'ratio':>6}  state, bytes per parameter")
        for cost in tables[str(device)]:
            print(f"  {cost.name:22} {cost.milliseconds:8.2f} {cost.ratio:6.2f}  {cost.state_bytes:.0f}")
    print("", *summary(results), sep="\n")
    if options.json:
        written = {
            **about,
            "checks": [result._asdict() for result in results],
            "costs": {device: [cost._asdict() for cost in own] for device, own in tables.items()},
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    return int(any(result.verdict == "failed" for result in results))


def summary(results: Sequence[Result]) -> list[str]:
    """How many checks passed, failed and were skipped, in lines of text; and why those were skipped.

    Example:
        >>> summary([Result("cpu", "a", "ok", ""), Result("cpu", "b", "skipped", "no graphs")])
        ['1 check passed, 1 skipped', '  skipped: b (no graphs)']
    """
    by_verdict: dict[str, list[Result]] = {"ok": [], "failed": [], "skipped": []}
    for result in results:
        by_verdict[result.verdict].append(result)
    passed, failed, skipped = by_verdict.values()
    others = [f"{len(of)} {verdict}" for verdict, of in by_verdict.items() if of and verdict != "ok"]
    first = ", ".join([f"{len(passed)} check{'s' * (len(passed) != 1)} passed", *others])
    by_reason: dict[str, list[str]] = {}
    for result in skipped:
        by_reason.setdefault(result.detail, []).append(result.check)
    reasons = [f"  skipped: {'; '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return [first + "; please report this" * bool(failed), *reasons]


def _line(result: Result) -> str:
    return f"  {result.verdict:8} {result.check:30} {result.detail}"


if __name__ == "__main__":
    sys.exit(main())
