"""Recipes around optimizers: their numbers are those of the plain loop, and they resume to the bit."""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

import cprop


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(model, step):
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())


def test_optimizer_in_backward_is_the_optimizer_after_it_to_the_bit(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    from optimizer_in_backward import step_in_backward

    sys.modules.pop("optimizer_in_backward")
    usual, model = network(), network()
    after, inside = cprop.CPropAdamW(usual.parameters(), lr=1e-2), step_in_backward(model, lr=1e-2)

    def train(model, steps):
        for step in steps:
            loss(model, step).backward()
            assert all(p.grad is None for p in model.parameters())  # each was freed before the next was complete

    for step in range(20):
        loss(usual, step).backward()
        after.step()
        after.zero_grad()
    train(model, range(10))
    resumed = network()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    for name, optimizer in step_in_backward(resumed, lr=1e-2).items():
        optimizer.load_state_dict(copy.deepcopy(inside[name].state_dict()))
    train(model, range(10, 20))
    train(resumed, range(10, 20))
    for expected, ours, again in zip(*(m.parameters() for m in (usual, model, resumed)), strict=True):
        assert torch.equal(expected, ours)
        assert torch.equal(expected, again)
