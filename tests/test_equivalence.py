"""Natives against the wrapper, and both against plain torch."""

import math

import pytest
import torch
from table import NATIVES, cases, every_inner, gradients, inputs, train

import cprop


def every_native(wanted=lambda native: True):
    """All settings of the natives that are wanted: the rule has a branch for each."""
    return pytest.mark.parametrize("native", cases([n for n in NATIVES if wanted(n)], pytest.mark.slow))


STEPS = 60


def assert_equal(ours, theirs):
    """To 1e-6 and far better in float64, where only the arithmetic counts.

    In float32 the wrapper rounds each parameter twice per step (the inner step, the scaled step) and a native once:
    60 such roundings are 5e-7 in the root mean square, and up to 5e-6 in the worst element.
    """
    errors = torch.cat([((a - b) / (1 + a.abs())).detach().flatten() for a, b in zip(ours, theirs, strict=True)])
    assert errors.square().mean().sqrt() < 5e-7
    assert errors.abs().max() < (2e-8 if errors.dtype == torch.float64 else 5e-6)


def pair(native, dtype=torch.float32, **settings):
    """The native optimizer and the wrapper around its plain twin, on equal parameters."""
    ours, theirs = inputs(dtype), inputs(dtype)
    wrapper = cprop.CProp(
        native.plain(theirs, **native.settings), **{k.removeprefix("cprop_"): v for k, v in settings.items()}
    )
    return (native.cls(ours, **native.settings, **settings), ours), (wrapper, theirs)


@pytest.mark.parametrize(
    ("beta", "dtype"),
    [
        (0.999, torch.float32),
        pytest.param(0.9, torch.float64, marks=pytest.mark.slow),
        pytest.param(0.9, torch.float32, marks=pytest.mark.nightly),
        pytest.param(0.999, torch.float64, marks=pytest.mark.nightly),
    ],
)
@every_native(lambda native: not native.decouples)
def test_native_equals_the_wrapper(native, beta, dtype):
    (optimizer, ours), (wrapper, theirs) = pair(native, dtype, cprop_beta=beta)
    train(optimizer, ours, STEPS)
    train(wrapper, theirs, STEPS)
    assert_equal(ours, theirs)
    for (_, a), (_, b) in zip(optimizer.scales(), wrapper.scales(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert min(scale.min() for _, scale in optimizer.scales() if scale.numel()) < 0.99, "nothing was scaled"


@every_native(lambda native: native.decouples)
def test_decoupled_decay_is_scaled_by_the_wrapper_alone(native):
    (optimizer, ours), (wrapper, theirs) = pair(native)
    for step in range(50):
        with torch.no_grad():  # level again, so that each step shows its own difference alone
            for a, b in zip(ours, theirs, strict=True):
                b.copy_(a)
        before = [p.detach().clone() for p in ours]
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        wrapper.step()
    group = optimizer.param_groups[0]
    shrink = group["lr"] * group["weight_decay"]
    for (a, scale), b, p in zip(optimizer.scales(), theirs, before, strict=True):
        # native: p - lr wd p - s u;  wrapper: p - s lr wd p - s u
        torch.testing.assert_close(b - a, (1 - scale) * shrink * p, atol=1e-6, rtol=0)


@pytest.mark.slow
@every_native(lambda native: not native.decouples and native.cls is not cprop.CPropAdamW)
def test_native_equals_the_wrapper_over_several_groups(native):
    def groups(params):
        overrides = ({}, {"lr": 0.002}, {"weight_decay": 0.3, "cprop_c": 3.0, "cprop_beta": 0.99})
        return [{"params": params[i::3], **override} for i, override in enumerate(overrides)]

    ours, theirs = inputs(), inputs()
    optimizer = native.cls(groups(ours), **native.settings)
    wrapper = cprop.CProp(native.plain(groups(theirs), **native.settings))
    train(optimizer, ours, STEPS)
    train(wrapper, theirs, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("rate", [float, torch.tensor])
@every_native(lambda native: native.cls is not cprop.CPropAdaBound)
def test_native_with_infinite_c_equals_torch_to_the_bit(native, rate):
    ours, theirs = inputs(), inputs()
    settings = {**native.settings, "lr": rate(native.settings["lr"])}
    train(native.cls(ours, **settings, cprop_c=math.inf), ours, STEPS)
    train(native.plain(theirs, **settings), theirs, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_native(lambda native: native.cls is cprop.CPropAdaBound)
def test_adabound_with_infinite_c_equals_the_other_implementation(native):
    # Not to the bit: that one adds 1e-15 under the root.
    ours, theirs = inputs(), inputs()
    train(native.cls(ours, **native.settings, cprop_c=math.inf), ours, STEPS)
    train(native.plain(theirs, **native.settings), theirs, STEPS)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.bfloat16, torch.float64))]
)
@every_inner
def test_wrapper_with_infinite_c_equals_the_inner_optimizer_to_the_bit(inner, dtype):
    ours, theirs = inputs(dtype), inputs(dtype)
    train(cprop.CProp(inner.cls(ours, **inner.settings), c=math.inf), ours, STEPS)
    train(inner.cls(theirs, **inner.settings), theirs, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("native", NATIVES[:1], ids=lambda n: n.id)
def test_infinite_c_takes_the_whole_step_on_zero_gradients_too(native):
    ours, theirs = inputs(), inputs()
    settings = {"lr": 0.1, "momentum": 0.9}
    optimizer, plain = native.cls(ours, **settings, cprop_c=math.inf), native.plain(theirs, **settings)
    for opt, params in ((optimizer, ours), (plain, theirs)):
        for step in range(10):
            gradients(params, step)
            if step > 0:
                for p in params:
                    p.grad.zero_()
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(scale, torch.ones_like(scale)) for _, scale in optimizer.scales())


@every_inner
def test_wrapper_scales_the_inner_update(inner):
    """One step, checked from outside: the move is the inner optimizer's move times the scale."""
    ours, theirs = inputs(), inputs()
    wrapper, plain = cprop.CProp(inner.cls(ours, **inner.settings)), inner.cls(theirs, **inner.settings)
    for step in range(20):
        with torch.no_grad():
            for a, b in zip(ours, theirs, strict=True):
                b.copy_(a)
        before = [p.detach().clone() for p in ours]
        gradients(ours, step)
        gradients(theirs, step)
        wrapper.step()
        plain.step()
        for (a, scale), b, p in zip(wrapper.scales(), theirs, before, strict=True):
            torch.testing.assert_close(a - p, scale * (b - p), atol=1e-6, rtol=1e-5)


def test_adam_shares_its_mean_square_only_where_it_is_the_same():
    def state_keys(**settings):
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = cprop.CPropAdam([w], **settings)
        w.grad = torch.ones(3)
        optimizer.step()
        return {key for key, value in optimizer.state[w].items() if value.shape == w.shape}

    three = {"exp_avg", "exp_avg_sq", "cprop_m"}
    assert state_keys() == three
    assert state_keys(betas=(0.9, 0.95), cprop_beta=0.95) == three
    assert state_keys(weight_decay=0.1, decoupled_weight_decay=True) == three
    assert state_keys(amsgrad=True) == three | {"max_exp_avg_sq"}
    assert state_keys(betas=(0.9, 0.95)) == three | {"cprop_v"}
    assert state_keys(weight_decay=0.1) == three | {"cprop_v"}


@pytest.mark.parametrize("change", [{"weight_decay": 0.1}, {"cprop_beta": 0.99}, {"betas": (0.9, 0.99)}])
def test_mean_squares_come_apart_in_mid_training(change):
    ours, theirs = inputs(), inputs()
    optimizer, wrapper = cprop.CPropAdam(ours, lr=0.01), cprop.CProp(torch.optim.Adam(theirs, lr=0.01))
    for start in (0, STEPS // 2):
        train(optimizer, ours, STEPS // 2, start)
        train(wrapper, theirs, STEPS // 2, start)
        optimizer.param_groups[0].update(change)
        wrapper.param_groups[0].update(change)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "measure", ["normal", *(pytest.param(m, marks=pytest.mark.slow) for m in ("student_t", "logistic", "moment_rate"))]
)
def test_settings_can_change_in_mid_training(measure):
    ours, theirs = inputs(), inputs()
    optimizer, wrapper = cprop.CPropAdam(ours, lr=0.01), cprop.CProp(torch.optim.Adam(theirs, lr=0.01))
    for start, c in ((0, 1.0), (20, 3.0), (40, 0.5)):
        for opt, params in ((optimizer, ours), (wrapper, theirs)):
            opt.param_groups[0].update(cprop_c=c, cprop_measure=measure, cprop_eps=1e-6)
            train(opt, params, 20, start)
    assert_equal(ours, theirs)


def test_relative_rate_chosen_in_mid_training_starts_from_an_upper_bound():
    ours = inputs()
    optimizer = cprop.CPropAdam(ours, lr=0.01)
    train(optimizer, ours, 100)
    optimizer.param_groups[0]["cprop_measure"] = "relative_rate"
    fresh = cprop.CPropAdam(inputs(), lr=0.01, cprop_measure="relative_rate")
    train(fresh, fresh.param_groups[0]["params"], 100)
    train(optimizer, ours, 1, start=100)
    for (_, a), (_, b) in zip(optimizer.scales(), fresh.scales(), strict=True):
        assert torch.all((a >= 0) & (a <= 1))
        assert a.shape == b.shape
    assert all(torch.isfinite(optimizer.state[p]["cprop_a"]).all() for p in ours)
