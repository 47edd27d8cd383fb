"""``torch.distributed.checkpoint``: saved by some ranks, loaded by others, and on as if nothing had happened.

Every rank trains on the whole batch, whose mean gradient is the same to the bit on any number of
ranks. So there is one right answer, and no tolerance.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import needs_fsdp2, spawn
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cprop
from cprop.execution.inductor import unavailable

OPTIMIZERS = {
    "CPropSGD": lambda groups: cprop.CPropSGD(groups, lr=0.05, momentum=0.9, dampening=0.1),
    "CPropAdamW": lambda groups: cprop.CPropAdamW(groups, lr=0.01),
    "CPropAdamW-fused": lambda groups: cprop.CPropAdamW(groups, lr=0.01, fused=True),
    "CPropAdam-bfloat16": lambda groups: cprop.CPropAdam(groups, lr=0.01, cprop_state_dtype="bfloat16"),
    "CPropRMSprop": lambda groups: cprop.CPropRMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "CPropAdaBound": lambda groups: cprop.CPropAdaBound(groups, lr=0.01),
    "CProp(SGD)": lambda groups: cprop.CProp(torch.optim.SGD(groups, lr=0.05)),
    "CProp(AdamW)": lambda groups: cprop.CProp(torch.optim.AdamW(groups, lr=0.01)),
}
if unavailable():
    del OPTIMIZERS["CPropAdamW-fused"]
# Of the others, written in the background shows nothing else.
IN_THE_BACKGROUND = ("CPropAdamW-fused", "CPropAdam-bfloat16", "CProp(AdamW)")
HALF, WHOLE = 3, 7


class Network(nn.Module):
    """With a layer that gets no gradient, at first or ever."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.late, self.never = nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 5), nn.Linear(3, 3)

    def forward(self, x, step):
        y = self.two(torch.tanh(self.one(x)))
        return y + self.late(y) if step > HALF + 1 else y


def make(name, mesh, backwards=False):
    """A model, sharded if there is a mesh, and its optimizer with two groups, in either order."""
    model = Network()
    if mesh is not None:
        for layer in (model.one, model.two, model.late, model.never):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters.items() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if n.endswith("bias")], "weight_decay": 0.0, "cprop_c": 2.0},
    ]
    return model, OPTIMIZERS[name](groups[::-1] if backwards else groups)


def train(model, optimizer, start, stop):
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 7, generator=generator), torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        (model(inputs, step) - targets).square().mean().backward()
        optimizer.step()


def parameters(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def planner(name):
    # An inner optimizer keeps nothing of a parameter that it has not seen, and the loader misses that;
    # so it does with torch's own optimizers. Ours are complete.
    return DefaultLoadPlanner(allow_partial_load=name == "CProp(AdamW)")


def formats(optimizer):
    return {v.dtype for state in optimizer.state.values() for k, v in state.items() if "step" not in k}


def save(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    background = dist.new_group(backend="gloo")  # training goes on meanwhile, and its messages must not mix
    for name in OPTIMIZERS:
        model, optimizer = make(name, mesh)
        train(model, optimizer, 0, HALF)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=f"{folder}/{name}-{world}")
        if name in IN_THE_BACKGROUND:
            path = f"{folder}/{name}-{world}-async"
            future = dcp.async_save(state, checkpoint_id=path, process_group=background)
        train(model, optimizer, HALF, WHOLE)  # while it is being written
        if name in IN_THE_BACKGROUND:
            future.result()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full_model, full_optimizer = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            torch.save({"model": full_model, "optimizer": full_optimizer}, f"{folder}/{name}-{world}-full.pt")


def load(rank, world, folder, saved_by):
    """On this many ranks, or unsharded if world is one, from each kind of checkpoint."""
    for mesh in [init_device_mesh("cpu", (world,)), *([None] if world == 1 else [])]:
        for name in OPTIMIZERS:
            for kind in ("", "-async") if name in IN_THE_BACKGROUND else ("",):
                # Stochastic rounding depends on a parameter's place in the optimizer.
                model, optimizer = make(name, mesh, backwards=kind == "" and "bfloat16" not in name)
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                dcp.load(state, checkpoint_id=f"{folder}/{name}-{saved_by}{kind}", planner=planner(name))
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                assert formats(optimizer) == {torch.bfloat16 if "bfloat16" in name else torch.float32}, name
                groups = {group["weight_decay"]: group["cprop_c"] for group in optimizer.param_groups}
                assert groups == {0.1: 1.0, 0.0: 2.0}
                # The inner optimizer's counter of a layer unseen so far stands at one, for DCP has stepped it:
                # to the bit then until that layer joins in.
                stop = HALF + 2 if name == "CProp(AdamW)" else WHOLE
                train(model, optimizer, HALF, stop)
                assert same(parameters(model), reference(name, stop)), (name, kind, world)
            load_full(name, mesh, f"{folder}/{name}-{saved_by}-full.pt")
        if world > 1:
            refuse_what_is_sharded_in_another_way(mesh)


def refuse_what_is_sharded_in_another_way(mesh):
    model, whole = make("CPropAdamW", None)
    train(model, whole, 0, 1)
    _, sharded = make("CPropAdamW", mesh)
    with pytest.raises(cprop.CheckpointError, match=r"on this rank and should have .* sharded differently"):
        sharded.load_state_dict(whole.state_dict())
    assert not sharded.state


def load_full(name, mesh, path):
    saved = torch.load(path, weights_only=True)
    model, optimizer = make(name, mesh)
    # As with torch's own optimizers, and as in planner(): an inner optimizer keeps nothing of what it has not seen.
    options = StateDictOptions(full_state_dict=True, strict=name != "CProp(AdamW)")
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
    )
    train(model, optimizer, WHOLE, WHOLE + 3)
    assert same(parameters(model), reference(name, WHOLE + 3)), name


@cache
def reference(name, stop):
    """One process, never interrupted."""
    model, optimizer = make(name, None)
    train(model, optimizer, 0, stop)
    return parameters(model)


def load_and_save(rank, world, folder, saved_by):
    load(rank, world, folder, saved_by)
    save(rank, world, folder)


@needs_fsdp2
@pytest.mark.slow
def test_saved_on_some_ranks_and_loaded_on_others(tmp_path):
    spawn(save, 4, tmp_path)
    spawn(load_and_save, 2, tmp_path, 4)
    spawn(load, 4, tmp_path, 2)
    spawn(load, 1, tmp_path, 4)


def test_a_parameter_without_gradient_is_in_the_checkpoint_and_stays_unseen():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, optimizer = make("CPropSGD", None)
        train(model, optimizer, 0, 3)
        state = optimizer.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
        assert model.never.weight not in optimizer.state
        other_model, other = make("CPropSGD", None)
        other.load_state_dict(optimizer.state_dict())
        assert other_model.never.weight not in {p for p, s in other.state.items() if s}
    finally:
        dist.destroy_process_group()


def test_the_wrappers_inner_optimizer_misses_what_torchs_own_misses(tmp_path):
    """Without ``allow_partial_load`` DCP refuses, by name, and with torch's AdamW alone it does the same."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for build in (lambda g: cprop.CProp(torch.optim.AdamW(g)), torch.optim.AdamW):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            model = Network()
            optimizer = build(model.parameters())
            train(model, optimizer, 0, 2)
            dcp.save({"optimizer": get_state_dict(model, optimizer)[1]}, checkpoint_id=folder)
            model = Network()
            fresh = {"optimizer": get_state_dict(model, build(model.parameters()))[1]}
            with pytest.raises(
                (RuntimeError, dcp.api.CheckpointException),
                match=r"Missing key in checkpoint state_dict: optimizer.state.late.weight.step",
            ):
                dcp.load(fresh, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
    assert Path(folder).exists()
