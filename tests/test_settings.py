"""Settings: out of range, misnamed, at the edge of what numbers there are, and edited in mid-training."""

import copy
import inspect
import math
import re

import numpy as np
import pytest
import torch
from table import (
    BUILDS,
    NATIVE_CLASSES,
    WAYS,
    every_build,
    every_way,
    gradients,
    inputs,
    through_a_file,
    train,
)

import cprop

# --- out of range ---------------------------------------------------------------------------------


INVALID = [
    ({"beta": 1.0}, r"invalid cprop_beta 1\.0: the horizon must be in \[0, 1\); 0\.999 looks back"),
    ({"beta": -0.1}, r"invalid cprop_beta -0\.1"),
    ({"beta": math.nan}, r"invalid cprop_beta nan"),
    ({"c": 0.0}, r"invalid cprop_c 0\.0: the overconfidence must be in \(0, inf\]; the paper uses 1"),
    ({"c": -1.0}, r"invalid cprop_c -1\.0"),
    ({"c": math.nan}, r"invalid cprop_c nan"),
    (
        {"eps": -1e-8},
        r"invalid cprop_eps -1e-08: it must be in \[0, inf\); 0 makes the scale independent .*, the paper uses 1e-8",
    ),
    ({"eps": math.inf}, r"invalid cprop_eps inf"),
    ({"measure": "cauchy"}, r"unknown measure 'cauchy': choose one of 'normal'"),
]


@pytest.mark.parametrize(("setting", "message"), INVALID)
def test_invalid_settings_of_the_wrapper(setting, message):
    with pytest.raises(ValueError, match=message):
        cprop.CProp(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), **setting)


@pytest.mark.parametrize(("setting", "message"), INVALID)
@pytest.mark.parametrize(
    "cls",
    [cprop.CPropSGD, cprop.CPropAdam, cprop.CPropAdamW, cprop.CPropRMSprop, cprop.CPropAdaBound],
)
def test_invalid_settings_of_the_natives(cls, setting, message):
    prefixed = {f"cprop_{name}": value for name, value in setting.items()}
    w = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        cls([w], **prefixed)
    with pytest.raises(ValueError, match=message):
        cls([{"params": [w], **prefixed}])
    with pytest.raises(ValueError, match=message):
        cls([torch.nn.Parameter(torch.zeros(1))]).add_param_group({"params": [w], **prefixed})


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (cprop.CPropSGD, {"lr": -1.0}, r"invalid lr -1\.0: the learning rate must be at least 0"),
        (cprop.CPropSGD, {"lr": torch.ones(2)}, r"a tensor lr must have one element"),
        (cprop.CPropSGD, {"momentum": -0.5}, r"invalid momentum -0\.5: it must be at least 0"),
        (cprop.CPropSGD, {"weight_decay": -0.5}, r"invalid weight_decay -0\.5: it must be at least 0"),
        (cprop.CPropSGD, {"nesterov": True}, r"nesterov needs momentum > 0 and dampening = 0, but got momentum 0\.0"),
        (cprop.CPropAdam, {"lr": -1.0}, r"invalid lr -1\.0"),
        (cprop.CPropAdam, {"eps": -1.0}, r"invalid eps -1\.0: it must be at least 0"),
        (cprop.CPropAdam, {"betas": (1.0, 0.999)}, r"invalid betas\[0\] 1\.0: it must be in \[0, 1\)"),
        (cprop.CPropAdam, {"betas": (0.9, -1.0)}, r"invalid betas\[1\] -1\.0"),
        (cprop.CPropAdamW, {"weight_decay": -0.5}, r"invalid weight_decay -0\.5"),
        (cprop.CPropRMSprop, {"alpha": 1.5}, r"invalid alpha 1\.5: it must be in \[0, 1\)"),
        (cprop.CPropRMSprop, {"momentum": -1.0}, r"invalid momentum -1\.0"),
        (cprop.CPropAdaBound, {"gamma": 0.0}, r"invalid gamma 0\.0: it must be in \(0, 1\)"),
        (cprop.CPropAdaBound, {"final_lr": -0.1}, r"invalid final_lr -0\.1"),
    ],
)
def test_invalid_arguments_of_the_algorithms(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls([torch.nn.Parameter(torch.zeros(1))], **arguments)


def test_unknown_argument_is_refused_by_name():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'cprop_betta': choose from lr, .*cprop_beta"):
        cprop.CPropAdam([torch.nn.Parameter(torch.zeros(1))], cprop_betta=0.9)


@every_way
@pytest.mark.parametrize("build", [cprop.CPropSGD, cprop.CPropAdam, cprop.CProp.around(torch.optim.SGD)])
@pytest.mark.parametrize(
    "c", [torch.tensor(math.inf), torch.tensor(1e39, dtype=torch.float64), 1e39, 3e38, np.float32("inf")]
)
def test_huge_and_infinite_c(build, c, way):
    """A row without gradient has no sign to be sure of: it does not move, and nothing is NaN."""
    w = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = build([w], lr=0.1, cprop_c=c, **WAYS[way])
    for sign in (1.0, -1.0, 1.0):
        w.grad = torch.full((3, 4), sign)
        w.grad[1] = 0.0
        optimizer.step()
    assert torch.equal(w[1], torch.ones(4))
    assert torch.isfinite(w).all()
    ((_, scale),) = optimizer.scales()
    assert torch.equal(scale[0], torch.ones(4))
    assert (scale[1] == (1.0 if math.isinf(c) else 0.0)).all()


# --- names that are easily confused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("cprop_betta", "write cprop_beta"),
        ("cprop_stat_dtype", "write cprop_state_dtype"),
        ("cprop_lr", "write cprop_c|choose from cprop_beta, cprop_c"),
        ("c", "write cprop_c"),
        ("measure", "write cprop_measure"),
    ],
)
@every_build
def test_a_misnamed_setting_in_a_group_says_the_right_one(build, setting, instead):
    params = inputs()
    refused = rf"unexpected setting '{setting}' in a param group: ({instead})"
    with pytest.raises(TypeError, match=refused):
        build([{"params": params, setting: 0.9}], lr=0.01)
    optimizer = build(params[:1], lr=0.01)
    with pytest.raises(TypeError, match=refused):
        optimizer.add_param_group({"params": params[1:], setting: 0.9})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=refused):
        cprop.CProp(torch.optim.SGD([{"params": params, setting: 0.9}], lr=0.01))


@every_build
def test_groups_with_settings_of_other_tools_and_of_other_versions_are_taken(build):
    params = inputs()
    others = {"name": "all", "initial_lr": 0.1, "max_lr": 1.0, "lr_scale": 0.5, "swa_lr": 0.1, "eps": 1e-8, 7: "seven"}
    optimizer = build([{"params": params[:3], **others}, {"params": params[3:], "cprop_c": 2.0}], lr=0.01)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["cprop_of_an_older_version"] = 1.0
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1, start=1)
    for other in BUILDS:  # their groups have flags that this one does not have, and all are unset
        other(
            [{**group, "params": [torch.nn.Parameter(torch.ones(2))]} for group in build(params).param_groups], lr=0.1
        )


def test_a_setting_by_its_other_name_says_the_right_one():
    params = inputs()
    with pytest.raises(TypeError, match="unexpected keyword argument 'c': write cprop_c"):
        cprop.CPropAdam(params, c=2.0)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'cprop_c': write c$"):
        cprop.CProp(torch.optim.Adam(params), cprop_c=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta': write cprop_beta"):
        cprop.CProp.around(torch.optim.Adam)(params, beta=0.99)
    with pytest.raises(TypeError, match="'gamma': it is not a CProp setting"):
        cprop.CProp(torch.optim.Adam(params), gamma=2.0)
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\) instead of model.parameters\(\)"):
        cprop.Monitor(cprop.CPropAdam(params), params)


# --- edited in mid-training -----------------------------------------------------------------------


def noise(p, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "build", [cprop.CPropSGD, cprop.CPropAdam, cprop.CPropRMSprop, cprop.CProp.around(torch.optim.SGD)]
)
def test_raising_beta_makes_cprop_no_surer(build, storage):
    """The formula alone took averages of 100 gradients for averages of 1,000: noise had a mean scale of 0.74."""
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = build([p], lr=0.0, cprop_beta=0.99, cprop_state_dtype=storage)
    noise(p, optimizer, 400)
    before = optimizer.state[p]["cprop_step"].item()
    optimizer.param_groups[0]["cprop_beta"] = 0.999
    for steps in (1, 30, 300):
        noise(p, optimizer, steps, seed=steps)
        ((_, scale),) = optimizer.scales()
        assert 0.35 < scale.mean() < 0.5, steps  # at the start of a training, noise has 0.5
    state = optimizer.state[p]
    assert state["cprop_step"] + state["cprop_earlier"] == pytest.approx(before + 331, abs=1e-2)
    monitor = cprop.Monitor(optimizer)
    assert monitor.sample().step == before + 331


@pytest.mark.parametrize("first", [1, 3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.999), (0.999, 0.9), (0.0, 0.9), (0.9, 0.0), (0.99, 0.995)])
def test_after_a_change_of_beta_the_statistics_follow_the_recurrences(before, after, first):
    """``n = 1 + beta n``, and each new gradient is one in ``n``."""
    p = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = cprop.CPropSGD([p], lr=0.0, cprop_beta=before)
    generator = torch.Generator().manual_seed(0)
    n, mean, mean_square = 0.0, torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for step in range(first + 5):
        beta = before if step < first else after
        optimizer.param_groups[0]["cprop_beta"] = beta
        if step == first:
            n = min(n, (1 - beta**step) / (1 - beta))  # a shorter horizon counts no more than itself
        p.grad = torch.randn(8, generator=generator, dtype=torch.float64)
        optimizer.step()
        n = 1 + beta * n
        mean += (p.grad - mean) / n
        mean_square += (p.grad**2 - mean_square) / n
    ((_, _, moments),) = optimizer.moments()
    torch.testing.assert_close(moments.m_hat, mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moments.v_hat, mean_square, rtol=1e-4, atol=1e-6)
    assert moments.k.n == pytest.approx(n, rel=1e-4)


def test_a_change_of_beta_survives_a_checkpoint_that_is_written_before_the_next_step():
    p = torch.nn.Parameter(torch.zeros(1000))
    optimizer = cprop.CPropAdam([p], lr=0.0, cprop_beta=0.99)
    noise(p, optimizer, 200)
    optimizer.param_groups[0]["cprop_beta"] = 0.999
    copies = [copy.deepcopy(optimizer)]
    resumed = cprop.CPropAdam([copy.deepcopy(p)], lr=0.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    copies.append(resumed)
    noise(p, optimizer, 5)
    for each in copies:
        noise(each.param_groups[0]["params"][0], each, 5)
        assert torch.equal(next(each.scales())[1], next(optimizer.scales())[1])


@every_build
@pytest.mark.parametrize(("setting", "value"), [("cprop_beta", 1.5), ("cprop_c", -1.0), ("cprop_eps", math.nan)])
def test_an_edit_out_of_range_is_refused_before_anything_moves(build, setting, value):
    params = inputs()[1:2]
    optimizer = build(params, lr=0.01)
    train(optimizer, params, 1)
    before = params[0].detach().clone()
    optimizer.param_groups[0][setting] = value
    gradients(params, 1)
    with pytest.raises(ValueError, match=rf"invalid {setting} {value}"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["cprop_step"] == 1


# --- and described


@pytest.mark.parametrize("cls", [cprop.CProp, *NATIVE_CLASSES])
def test_every_argument_is_described_once_and_in_help(cls):
    names = [name for name in inspect.signature(cls).parameters if name not in ("unknown", "misnamed")]
    described = re.findall(r"(?m)^    (\w+): \S", inspect.getdoc(cls).partition("Args:")[2].partition("\n\n")[0])
    assert sorted(described) == sorted(names)
    assert "{" not in inspect.getdoc(cls).partition("Args:")[2]
