"""One hour of a GPU: ``python -m benchmarks.gpu_hour TEXT [--then OTHER_TEXT]``.

What nobody here could run, written down before anybody does. It trains a language model of 100 million parameters on
the bytes of a text, which should have 100 MB or more, and then fine-tunes it with adapters of low rank on another text,
or on the last tenth of the same one. ``--toy`` does all of it in a minute on a CPU, and says nothing about CProp.

Rates are fixed: AdamW has a common one, and CProp twice that, because it lowers it by itself. The rule: AdamW with
cosine decay and CProp run with two seeds. The yardstick is the larger of their differences between seeds. A row is
ahead of another if the mean of its held-out loss is lower by more than twice the yardstick; everything else is a tie.
Nothing is left out: a run that diverged has an infinite loss.

A run that is finished is kept in the folder of the results, and the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import cprop

BYTES = 256
RANK = 16
"""Of the adapters."""
WARMUP = 0.05
"""Part of a run over which every rate rises."""
PRETRAINING, FINE_TUNING = "pretraining", "fine-tuning"


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    layers: int = 12
    width: int = 832
    heads: int = 13
    context: int = 1024
    batch: int = 32
    small_batch: int = 4
    """Of fine-tuning."""
    steps: int = 1_000
    fine_tuning_steps: int = 300
    held_out: int = 256
    """Windows of the text that evaluations see; always the same."""
    evaluations: int = 10


TOY = Size(layers=2, width=32, heads=2, context=32, batch=4, small_batch=2, steps=20, fine_tuning_steps=10, held_out=8)


class Block(nn.Module):
    """Attention and a perceptron, both with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.widen = nn.Linear(size.width, 4 * size.width, bias=False)
        self.narrow = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch of windows."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.first(x)).chunk(3, 2)
        )
        x = x + self.project(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


class LanguageModel(nn.Module):
    """A transformer on bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.leave = nn.Sequential(nn.RMSNorm(size.width), nn.Linear(size.width, BYTES, bias=False))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of predicting every byte from those before it."""
        x = self.bytes(text[:, :-1]) + self.places.weight[: text.shape[1] - 1]
        logits: Tensor = self.leave(self.blocks(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


class Adapter(nn.Module):
    """A linear layer that stays, and a change of low rank that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, changed."""
        changed: Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return changed


def adapted(model: LanguageModel) -> LanguageModel:
    """The model with adapters in its blocks, and nothing else to be trained."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("attend", "project", "widen", "narrow"):
            setattr(block, name, Adapter(getattr(block, name)))
    return model


class Row(NamedTuple):
    """An optimizer with its rate and what surrounds it."""

    title: str
    build: Callable[[nn.Module, float], list[Optimizer]]
    lr: float
    fine_tuning_lr: float
    decay: str = ""
    """``cosine``, which knows the end; ``rsqrt``, which does not; or none."""
    averaged: bool = False
    seeds: int = 1


def adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    """AdamW, fused."""
    return [torch.optim.AdamW(trained(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]


def cprop_adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    """AdamW with CProp, fused."""
    return [cprop.CPropAdamW(trained(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]


def schedule_free(model: nn.Module, lr: float) -> list[Optimizer]:
    """Schedule-Free AdamW, from its own package."""
    from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped, unused-ignore]

    return [AdamWScheduleFree(trained(model), lr=lr, betas=(0.95, 0.95), weight_decay=0.1)]


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for the matrices inside, and AdamW for everything else."""
    matrices = {p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and "blocks" in name}
    others = [p for p in trained(model) if p not in matrices]
    inside = torch.optim.Muon(list(matrices), lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [inside, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)] if others else [inside]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


ROWS = (
    Row("AdamW, cosine", adamw, 6e-4, 3e-4, decay="cosine", seeds=2),
    Row("Schedule-Free AdamW", schedule_free, 2e-3, 1e-3),
    Row("Muon, inverse square root, averaged", muon, 2e-3, 6e-4, decay="rsqrt", averaged=True),
    Row("CProp(AdamW), averaged", cprop_adamw, 1.2e-3, 6e-4, averaged=True, seeds=2),
    Row("CProp(AdamW), inverse square root, averaged", cprop_adamw, 1.2e-3, 6e-4, decay="rsqrt", averaged=True),
)


def factor(step: int, steps: int, decay: str) -> float:
    """What a rate is multiplied by."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    if decay == "cosine":
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return math.sqrt(warmup / step) if decay == "rsqrt" else 1.0


class Text:
    """The bytes of a file: windows of its beginning are trained on, and some of its end are held out."""

    def __init__(self, path: Path, size: Size, device: str, last: float = 1.0) -> None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        data = data[int(len(data) * (1 - last)) :]
        end = len(data) - max(size.context * size.held_out // 4, len(data) // 20)
        if end < 4 * size.context:
            raise SystemExit(f"{path} has {len(data):,} bytes: take a text with at least 100 MB, or --toy")
        self.training, self.length, self.device = data[:end], size.context + 1, device
        starts = torch.linspace(end, len(data) - self.length, size.held_out).long().tolist()
        self.held_out = torch.stack([data[start : start + self.length] for start in starts])

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """Windows that are trained on."""
        starts = torch.randint(len(self.training) - self.length, (size,), generator=generator).tolist()
        return self.to_device(torch.stack([self.training[start : start + self.length] for start in starts]))

    def to_device(self, windows: Tensor) -> Tensor:
        """Windows, where the model is."""
        return windows.to(self.device, non_blocking=True).long()


def train(row: Row, model: LanguageModel, text: Text, phase: str, size: Size, seed: int) -> dict[str, Any]:
    """Train a model with a row's optimizer, and measure."""
    fine = phase == FINE_TUNING
    steps, batch = (size.fine_tuning_steps, size.small_batch) if fine else (size.steps, size.batch)
    optimizers = row.build(model, row.fine_tuning_lr if fine else row.lr)
    schedules = [LambdaLR(one, lambda step: factor(step, steps, row.decay)) for one in optimizers]
    averaged = deepcopy(model).requires_grad_(False) if row.averaged else None
    on_gpu = text.device == "cuda"
    forward = torch.compile(model) if on_gpu else model
    generator = torch.Generator().manual_seed(seed)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    curve: list[dict[str, float]] = []
    for stretch in track(range(size.evaluations), f"{phase}: {row.title}, seed {seed}"):
        start = time.perf_counter()
        for one in optimizers:
            getattr(one, "train", lambda: None)()
        done = range(steps * stretch // size.evaluations, steps * (stretch + 1) // size.evaluations)
        for step in done:
            with torch.autocast(text.device, torch.bfloat16):
                loss = forward(text.batch(batch, generator))
            loss.backward()
            nn.utils.clip_grad_norm_(trained(model), 1.0)
            for one, schedule in zip(optimizers, schedules, strict=True):
                one.step()
                one.zero_grad()
                schedule.step()
            if averaged is not None:  # over about the last ninth of the run so far
                torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 9 / (step + 9))
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for one in optimizers:
            getattr(one, "eval", lambda: None)()
        held_out = evaluate(averaged or model, text, size.batch)
        curve.append({"steps": len(done), "held_out": held_out, "seconds": seconds})
    if averaged is not None:
        model.load_state_dict(averaged.state_dict())
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    # The median, since the first stretch compiles.
    pace = 1e3 * median(one["seconds"] / one["steps"] for one in curve)
    return {"phase": phase, "row": row.title, "seed": seed, "curve": curve, "ms_per_step": pace, "peak_gib": peak}


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, batch: int) -> float:
    """The mean held-out loss."""
    with torch.autocast(text.device, torch.bfloat16):
        found = fmean(model(text.to_device(part)).item() for part in text.held_out.split(batch))
    return found if math.isfinite(found) else math.inf


def runs(folder: Path, text: Text, then: Text, size: Size) -> Iterator[dict[str, Any]]:
    """All runs, one after the other; those that are finished are read."""
    base = folder / "model.pt"

    def new_model(seed: int) -> LanguageModel:
        torch.manual_seed(seed)
        return LanguageModel(size).to(text.device)

    def result(phase: str, row: Row, seed: int, model: Callable[[], LanguageModel], keep: bool = False) -> Any:
        path = folder / f"{phase}-{ROWS.index(row)}-{seed}.json"
        if not path.exists():
            network = model()
            found = train(row, network, text if phase == PRETRAINING else then, phase, size, seed)
            if keep:
                torch.save(network.state_dict(), base)
            path.write_text(json.dumps(found))
        return json.loads(path.read_text())

    def fine_tuned(seed: int) -> LanguageModel:
        model = new_model(seed)
        model.load_state_dict(torch.load(base, map_location=text.device, weights_only=True))
        return adapted(model).to(text.device)

    for row in ROWS:
        for seed in range(row.seeds):
            yield result(PRETRAINING, row, seed, lambda seed=seed: new_model(seed), row is ROWS[0] and seed == 0)  # type: ignore[misc]
    for row in ROWS:
        for seed in range(row.seeds):
            yield result(FINE_TUNING, row, seed, lambda seed=seed: fine_tuned(seed))  # type: ignore[misc]


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    """What the rule says."""
    said = []
    for phase in (PRETRAINING, FINE_TUNING):
        losses: dict[str, list[float]] = {}
        for one in results:
            if one["phase"] == phase:
                losses.setdefault(one["row"], []).append(one["curve"][-1]["held_out"])
        yardstick = max((max(values) - min(values) for values in losses.values() if len(values) > 1), default=math.inf)
        ours = {title: fmean(values) for title, values in losses.items() if title.startswith("CProp")}
        best = min(ours, key=lambda title: ours[title])
        for title, values in losses.items():
            if title not in ours:
                difference = ours[best] - fmean(values)
                word = (
                    "level with" if not abs(difference) > 2 * yardstick else "ahead of" if difference < 0 else "behind"
                )
                said.append(f"{phase}: {best} is {word} {title} ({difference:+.4f}; yardstick {yardstick:.4f})")
    return said


def main() -> None:
    """Run everything that is missing, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file of 100 MB or more")
    parser.add_argument("--then", type=Path, help="another text, to fine-tune on")
    parser.add_argument("--results", type=Path, default=Path("gpu-hour"), help="folder for results")
    parser.add_argument("--toy", action="store_true", help="a minute on a CPU, to see that it works")
    arguments = parser.parse_args()
    size, device = TOY if arguments.toy else Size(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.toy:
        raise SystemExit("there is no GPU: on a CPU this would take weeks. --toy shows in a minute that it works")
    arguments.results.mkdir(parents=True, exist_ok=True)
    text = Text(arguments.text, size, device)
    then = Text(arguments.then or arguments.text, size, device, last=1.0 if arguments.then else 0.1)
    table = Table("phase", "row", "seed", "held-out loss", "ms per step", "peak GiB")
    results = []
    for one in runs(arguments.results, text, then, size):
        results.append(one)
        cells = (f"{one['curve'][-1]['held_out']:.4f}", f"{one['ms_per_step']:.1f}", f"{one['peak_gib']:.2f}")
        table.add_row(one["phase"], one["row"], str(one["seed"]), *cells)
    console = Console()
    console.print(table)
    for line in verdicts(results):
        console.print(line, highlight=False, soft_wrap=True)
    if arguments.toy:
        console.print("A toy: it shows that the command works, and says nothing about CProp.", style="yellow")
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    about = {"device": where, "torch": torch.__version__, "cprop": cprop.__version__, "toy": arguments.toy}
    path = arguments.results / "report.json"
    path.write_text(json.dumps({**about, "size": vars(size), "runs": results}, indent=1) + "\n")
    console.print(f"{path} has all of it: please attach it to an issue, whichever way it fell.", soft_wrap=True)


if __name__ == "__main__":
    main()
