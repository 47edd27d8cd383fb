"""Train a small language model under FSDP2, with checkpoints that survive whatever happens.

    torchrun --nproc-per-node 2 examples/fsdp2_dcp.py runs/language-model

Stop it, kill any of its processes, or restart it with a different number of processes: it resumes from
the newest complete checkpoint. The text is the source code of Python's standard library, byte by byte,
so there is nothing to download.
"""

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cprop
from cprop import checkpoint_files

CONTEXT, BATCH, WIDTH, HEADS = 32, 8, 36, 4


class Block(nn.Module):
    """Attention and a network of one hidden layer, each around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 90), nn.Linear(90, WIDTH)  # 90 rows on 4 ranks: uneven shards

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """The whole network."""
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def text() -> Tensor:
    """The source code of Python's standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def batch(corpus: Tensor, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a step's global batch, which does not depend on the number of ranks."""
    starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts[rank::world].tolist()])
    return rows[:, :-1], rows[:, 1:]


def candidates(folder: Path) -> list[Path]:
    """The finished checkpoints, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.suffix != ".partial"), reverse=True)


def is_whole(checkpoint: Path, rank: int, world: int) -> bool:
    """Whether a checkpoint is undamaged: each rank verifies its share of the files, and all must agree."""
    whole = torch.ones(1)
    try:
        checkpoint_files.verify(checkpoint, rank, world)
    except cprop.CheckpointError as error:
        print(f"skipped a damaged checkpoint: {error}", flush=True)
        whole.zero_()
    dist.all_reduce(whole, dist.ReduceOp.MIN)
    return bool(whole)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> int:
    """Load the newest undamaged checkpoint, and return its step; 0 if there is none."""
    for checkpoint in candidates(folder):
        dist.barrier()  # all ranks have seen the same folder
        if is_whole(checkpoint, rank, world):
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=checkpoint)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            return int(checkpoint.name.removeprefix("step-"))
        if rank == 0:  # moved aside, so that someone can look at it
            aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
        dist.barrier()
    return 0


class Saving:
    """Checkpoints that are written while training continues, and get their name only when they are complete."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.group = dist.new_group(backend="gloo")  # separate from the messages of training
        self.under_way: tuple[Any, Path] | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the state and let a thread write it; the previous checkpoint is finished first."""
        self.finish()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        partial = self.folder / f"step-{step:08d}.partial"
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        state = {"model": model_state, "optimizer": optimizer_state}
        self.under_way = dcp.async_save(state, checkpoint_id=partial, process_group=self.group), partial

    def finish(self, keep: int = 3) -> None:
        """Wait until it is written, seal the files, and rename the folder in one atomic move."""
        if self.under_way is None:
            return
        future, partial = self.under_way
        future.result()
        dist.barrier()
        checkpoint_files.seal(partial, self.rank, self.world)
        dist.barrier()
        if self.rank == 0:
            partial.rename(partial.with_suffix(""))
            print(f"saved {partial.stem}", flush=True)
            for old in candidates(self.folder)[keep:]:
                shutil.rmtree(old)
        dist.barrier()
        self.under_way = None


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = cprop.CPropAdamW(model.parameters(), lr=arguments.lr, fused=arguments.fused or None)

    arguments.folder.mkdir(parents=True, exist_ok=True)
    done = restore(arguments.folder, model, optimizer, rank, world)
    log = (arguments.folder / "log.jsonl").open("a") if rank == 0 else None
    note(log, event="started", step=done, world=world)
    if rank == 0:
        print(f"{f'resumed from step {done}' if done else 'starting at step 0'} on {world} processes", flush=True)
    corpus, saving = text(), Saving(arguments.folder, rank, world)
    for step in range(done, arguments.steps):
        inputs, targets = batch(corpus, step, rank, world)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        note(log, event="step", step=step + 1, loss=mean.item())
        if (step + 1) % arguments.every == 0:
            if rank == 0:
                print(f"step {step + 1} of {arguments.steps}: loss {mean.item():.3f}", flush=True)
            saving.begin(model, optimizer, step + 1)
    saving.finish()
    note(log, event="finished", step=arguments.steps)
    if rank == 0:
        print(f"finished {arguments.steps} steps; the log is {arguments.folder / 'log.jsonl'}", flush=True)


def note(log: Any, **entry: Any) -> None:
    """Write a line to rank 0's log."""
    if log is not None:
        log.write(json.dumps(entry) + "\n")
        log.flush()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder for checkpoints and the log; training resumes from what is there"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--fused", action="store_true", help="run the optimizer as compiled kernels")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
