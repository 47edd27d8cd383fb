"""Traps of torch.optim, each as a check that our wrapper passes and a naive one falls into.

The naive wrapper is Algorithm 1 as one writes it first. That it fails every check shows that every
check can fail.
"""

import copy
import io
import math
import pickle

import pytest
import torch
from table import gradients, inputs, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import cprop


class Naive(torch.optim.Optimizer):
    """Algorithm 1, formula by formula, sharing the inner optimizer's groups and state."""

    def __init__(self, optimizer, beta=0.999, c=1.0, eps=1e-8):
        super().__init__([torch.zeros(1)], dict(optimizer.defaults))
        self.inner, self.beta, self.c, self.eps = optimizer, beta, c, eps
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self, closure=None):
        before = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "cprop_m" not in state:
                        state["cprop_m"], state["cprop_v"] = torch.zeros_like(p), torch.zeros_like(p)
                        state["cprop_step"] = torch.tensor(0.0)
                    before[p] = p.clone()
        self.inner.step(closure)
        for p, start in before.items():
            g, state = p.grad, self.state[p]
            state["cprop_step"] += 1
            state["cprop_m"].mul_(self.beta).add_(g, alpha=1 - self.beta)
            state["cprop_v"].mul_(self.beta).addcmul_(g, g, value=1 - self.beta)
            correction = 1 - self.beta ** state["cprop_step"].item()
            m_hat, v_hat = state["cprop_m"] / correction, state["cprop_v"] / correction
            n = correction / (1 - self.beta)
            sigma = ((v_hat - m_hat**2).clamp_min(0) / (n - 1 + self.eps)).sqrt() + self.eps
            scale = (self.c * torch.erf(m_hat.abs() / (sigma * math.sqrt(2)))).clamp_max(1)
            p.copy_(start + scale * (p - start))

    def scales(self):
        for p, state in self.state.items():
            correction = 1 - self.beta ** state["cprop_step"].item()
            m_hat, v_hat = state["cprop_m"] / correction, state["cprop_v"] / correction
            yield p, cprop.conformity_scale(m_hat, v_hat, correction / (1 - self.beta), c=self.c, eps=self.eps)


def saved_and_loaded(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def asking_for_a_checkpoint_changes_no_parameter(wrap):
    # 1: DCP calls step() with zero gradients and lr 0. With eps = 0 a naive scale is 0 / 0.
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, wrap(torch.optim.Adam(model.parameters()), eps=0.0))
    assert torch.equal(model.weight, before)


def a_loaded_optimizer_obeys_its_learning_rate(wrap):
    # 2: load_state_dict replaces the groups of one of the two.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 2)
    optimizer.load_state_dict(saved_and_loaded(optimizer))
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1, start=2)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def a_deep_copy_trains(wrap):
    # 3: Optimizer.__getstate__ drops the inner optimizer.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 2)
    twin, twin_params = copy.deepcopy((optimizer, params))
    train(twin, twin_params, 1, start=2)


def a_pickle_trains(wrap):
    # 3: the same for pickle.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    twin, twin_params = pickle.loads(pickle.dumps((optimizer, params)))
    train(twin, twin_params, 1)


def the_inner_optimizer_finds_its_state_empty_at_first(wrap):
    # 4: Adam initialises on len(state) == 0.
    params = inputs()
    train(wrap(torch.optim.Adam(params)), params, 2)


def statistics_of_bfloat16_stay_float32_on_load(wrap):
    # 5: torch casts floating state to the parameter's dtype.
    params = inputs(torch.bfloat16)
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 300)
    optimizer.load_state_dict(saved_and_loaded(optimizer))
    state = optimizer.state[params[1]]
    assert state["cprop_m"].dtype == state["cprop_v"].dtype == torch.float32
    train(optimizer, params, 5, start=300)
    assert state["cprop_step"] == 305


def statistics_are_of_the_gradient_before_the_inner_step(wrap):
    # 6: an inner optimizer may write to the gradient, as L2 decay by hand does.
    class Rude(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].grad.mul_(-100)
            super().step()

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = wrap(Rude([w], lr=0.01))
    w.grad = torch.full((3,), 2.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["cprop_m"], torch.full((3,), 0.002))


def dropping_the_gradient_is_survived(wrap):
    # 6: or set it to None.
    class Rude(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.zero_grad()

    params = inputs()
    train(wrap(Rude(params, lr=0.01)), params, 2)


def a_parameter_that_joins_late_counts_for_itself(wrap):
    # 8: no state without a gradient, and a counter a parameter: the scale of a first step is one.
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = wrap(torch.optim.Adam(params))
    train(optimizer, params[:1], 5)
    train(optimizer, params, 1, start=5)
    assert dict(optimizer.scales())[params[1]].eq(1).all()
    assert optimizer.state[params[1]]["step"] == 1


def every_element_takes_its_first_step_in_full(wrap):
    # 11: at t = 1 rounding noise is divided by eps.
    w = torch.nn.Parameter(torch.zeros(100_000))
    w.grad = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    optimizer.step()
    torch.testing.assert_close(w.detach(), -w.grad)


def small_gradients_learn_once_eps_is_lowered_in_the_groups(wrap):
    # 12: eps is absolute, and must be within reach of a running training.
    w = torch.nn.Parameter(torch.zeros(1000))
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    optimizer.param_groups[0]["cprop_eps"] = 0.0
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        w.grad = 1e-8 * (1 + torch.randn(1000, generator=generator))
        before = w.detach().clone()
        optimizer.step()
    share = (w.detach() - before).sum() / -w.grad.sum()
    assert share > 0.9


def dcp_loads_by_keyword(wrap):
    # 15: DCP calls load_state_dict(state_dict=...), and 4 again, for it makes a fresh optimizer step.
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.1))
    train(optimizer, list(model.parameters()), 3)
    twin = copy.deepcopy(model)
    resumed = wrap(torch.optim.Adam(twin.parameters(), lr=0.1))
    set_optimizer_state_dict(twin, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    train(optimizer, list(model.parameters()), 3, start=3)
    train(resumed, list(twin.parameters()), 3, start=3)
    assert torch.equal(model.weight, twin.weight)


def scale_one_is_the_inner_step_to_the_bit(wrap):
    # 16: before + 1 * (after - before) is not after.
    ours, theirs = inputs(), inputs()
    train(wrap(torch.optim.SGD(ours, lr=0.1), c=math.inf), ours, 20)
    train(torch.optim.SGD(theirs, lr=0.1), theirs, 20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def a_scheduler_steers_momentum_too(wrap):
    # OneCycleLR asks `defaults` for momentum, and sets it in the groups that the inner optimizer must read.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer.load_state_dict(saved_and_loaded(optimizer))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    gradients(params, 0)
    optimizer.step()
    scheduler.step()
    inner_group = optimizer.inner.param_groups[0]
    assert inner_group["momentum"] == optimizer.param_groups[0]["momentum"] != 0.9


TRAPS = [
    asking_for_a_checkpoint_changes_no_parameter,
    a_loaded_optimizer_obeys_its_learning_rate,
    a_deep_copy_trains,
    a_pickle_trains,
    the_inner_optimizer_finds_its_state_empty_at_first,
    statistics_of_bfloat16_stay_float32_on_load,
    statistics_are_of_the_gradient_before_the_inner_step,
    dropping_the_gradient_is_survived,
    a_parameter_that_joins_late_counts_for_itself,
    every_element_takes_its_first_step_in_full,
    small_gradients_learn_once_eps_is_lowered_in_the_groups,
    dcp_loads_by_keyword,
    scale_one_is_the_inner_step_to_the_bit,
    a_scheduler_steers_momentum_too,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_trap_is_avoided(trap):
    trap(cprop.CProp)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_naive_wrapper_falls_into_it(trap):
    with pytest.raises((AssertionError, AttributeError, KeyError, TypeError)):
        trap(Naive)
