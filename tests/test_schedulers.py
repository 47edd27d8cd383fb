"""Every learning-rate scheduler of torch, on the wrapper and on a native."""

import inspect
import math

import pytest
import torch
from table import gradients, inputs
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import cprop

ARGUMENTS = {
    "LambdaLR": lambda opt: {"lr_lambda": lambda t: 0.9**t},
    "MultiplicativeLR": lambda opt: {"lr_lambda": lambda t: 0.95},
    "StepLR": lambda opt: {"step_size": 3},
    "MultiStepLR": lambda opt: {"milestones": [2, 7]},
    "ConstantLR": lambda opt: {"factor": 0.5, "total_iters": 4},
    "LinearLR": lambda opt: {"total_iters": 6},
    "ExponentialLR": lambda opt: {"gamma": 0.9},
    "SequentialLR": lambda opt: {
        "schedulers": [lr_scheduler.ConstantLR(opt, 0.1, 3), lr_scheduler.ExponentialLR(opt, 0.9)],
        "milestones": [3],
    },
    "PolynomialLR": lambda opt: {"total_iters": 10, "power": 2.0},
    "CosineAnnealingLR": lambda opt: {"T_max": 10},
    "ChainedScheduler": lambda opt: [lr_scheduler.ConstantLR(opt, 0.1, 3), lr_scheduler.ExponentialLR(opt, 0.9)],
    "ReduceLROnPlateau": lambda opt: {"patience": 1},
    "CyclicLR": lambda opt: {"base_lr": 1e-4, "max_lr": 1e-2, "step_size_up": 4},
    "CosineAnnealingWarmRestarts": lambda opt: {"T_0": 4},
    "OneCycleLR": lambda opt: {"max_lr": 0.01, "total_steps": 30},
}


def schedulers():
    classes = {
        name: cls
        for name, cls in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(cls, LRScheduler)
        and name not in ("LRScheduler", "_LRScheduler")
        and cls.__module__.endswith("lr_scheduler")
    }
    missing = set(classes) - set(ARGUMENTS)
    assert not missing, f"torch has schedulers that this test does not know: {missing}"
    return sorted(classes.items())


OPTIMIZERS = {
    "wrapper": (lambda ps: cprop.CProp(torch.optim.Adam(ps, lr=0.01), c=math.inf), torch.optim.Adam),
    "native": (lambda ps: cprop.CPropAdam(ps, lr=0.01, cprop_c=math.inf), torch.optim.Adam),
    "wrapped SGD": (
        lambda ps: cprop.CProp(torch.optim.SGD(ps, lr=0.01, momentum=0.9), c=math.inf),
        lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9),
    ),
}


def make(name, cls, optimizer):
    arguments = ARGUMENTS[name](optimizer)
    return cls(arguments, optimizer) if name == "ChainedScheduler" else cls(optimizer, **arguments)


def train(optimizer, scheduler, params, steps, start=0):
    rates = []
    for step in range(start, start + steps):
        gradients(params, step)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    "kind", ["wrapper", *(pytest.param(k, marks=pytest.mark.slow) for k in ("native", "wrapped SGD"))]
)
@pytest.mark.parametrize(("name", "cls"), schedulers())
def test_scheduler_steers_as_it_steers_torch(name, cls, kind):
    # With the scaling off the parameters must be torch's to the bit, rates and momenta included.
    build, plain = OPTIMIZERS[kind]
    ours, theirs = inputs(), inputs()
    optimizer, reference = build(ours), plain(theirs, lr=0.01)
    scheduler, reference_scheduler = make(name, cls, optimizer), make(name, cls, reference)
    assert train(optimizer, scheduler, ours, 12) == train(reference, reference_scheduler, theirs, 12)
    # And after a checkpoint, when groups and state have been replaced.
    optimizer.load_state_dict(optimizer.state_dict())
    reference.load_state_dict(reference.state_dict())
    assert train(optimizer, scheduler, ours, 12, 12) == train(reference, reference_scheduler, theirs, 12, 12)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_scheduler_steers_adabounds_final_rate_whether_a_number_or_a_tensor():
    ends = []
    for lr in (0.01, torch.tensor(0.01)):
        params = inputs()
        optimizer = cprop.CPropAdaBound(params, lr=lr, final_lr=0.1, gamma=0.9)
        train(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), params, 8)
        assert float(optimizer.param_groups[0]["base_lr"]) == pytest.approx(0.01)
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b)


def test_scheduler_made_on_the_inner_optimizer_goes_on_steering_the_wrapper():
    params = inputs()
    inner = torch.optim.SGD(params, lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = cprop.CProp(inner)
    train(optimizer, scheduler, params, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, scheduler, params, 1, 3)
    assert optimizer.param_groups[0]["lr"] == 0.5**4
