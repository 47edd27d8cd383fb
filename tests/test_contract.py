"""What a tool around an optimizer may rely on, over the whole table."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from table import (
    every_optimizer,
    every_setting,
    gradients,
    inputs,
    same,
    through_a_file,
    train,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import cprop


def snapshot(optimizer, params):
    """Everything that a step may change, as values."""
    state = {
        (i, key): value.clone() if torch.is_tensor(value) else value
        for i, p in enumerate(params)
        for key, value in optimizer.state.get(p, {}).items()
    }
    return [p.detach().clone() for p in params], state


def assert_unchanged(before, after):
    (params, state), (params_after, state_after) = before, after
    assert same(params, params_after)
    assert state.keys() == state_after.keys()
    for key, value in state.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(state_after[key])), key


# --- being an optimizer ---------------------------------------------------------------------------


@every_optimizer
def test_is_an_optimizer(entry):
    optimizer = entry.build(inputs())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {"cprop_beta", "cprop_c", "cprop_eps", "cprop_measure", "lr"} <= set(optimizer.param_groups[0])
    assert set(optimizer.param_groups[0]) - {"params", "step"} <= set(optimizer.defaults)
    assert "cprop_beta: 0.999" in repr(optimizer)


@pytest.mark.slow
@every_optimizer
def test_minimises(entry):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.randn(256, 6)
    target = data[:, :2].sum(1, keepdim=True).sin()
    maximize = "maximize=True" in entry.id
    optimizer = entry.build(model.parameters())

    def loss():
        return (model(data) - target).square().mean()

    first = loss().item()
    for _ in range(150):
        batch = torch.randint(0, 256, (32,))
        optimizer.zero_grad()
        value = (model(data[batch]) - target[batch]).square().mean()
        (-value if maximize else value).backward()
        optimizer.step()
    assert loss().item() < 0.9 * first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@every_optimizer
def test_keeps_dtype_and_keeps_statistics_in_float32_or_wider(entry, dtype):
    params = inputs(dtype)
    optimizer = entry.build(params)
    train(optimizer, params, 5)
    assert all(p.dtype == dtype for p in params)
    if not (dtype == torch.float16 and "CProp-" in entry.id):  # in float16, torch's Adam divides by eps = 0
        assert all(torch.isfinite(p).all() for p in params)
    wide = torch.promote_types(dtype, torch.float32)
    for p in params:
        own = {k: v for k, v in optimizer.state[p].items() if k.startswith("cprop_") and k != "cprop_step"}
        assert own
        assert all(value.dtype == wide and value.shape == p.shape for value in own.values())


@every_optimizer
def test_state_is_laid_out_like_its_parameter(entry):
    params = inputs()
    optimizer = entry.build(params)
    train(optimizer, params, 1)
    for p in params:
        assert optimizer.state[p]["cprop_m"].stride() == p.stride()


@every_setting
def test_complex_parameters_are_pairs_of_real_ones(entry):
    if "Lion" in entry.id:
        pytest.skip("the inner optimizer refuses complex parameters")
    z = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
    w = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    on_complex, on_real = entry.build([z]), entry.build([w])
    for step in range(20):
        gradients([w], step)
        z.grad = torch.view_as_complex(w.grad.clone())
        on_complex.step()
        on_real.step()
    torch.testing.assert_close(torch.view_as_real(z.detach()), w.detach())
    for (_, a), (_, b) in zip(on_complex.scales(), on_real.scales(), strict=True):
        torch.testing.assert_close(a, b)


@every_optimizer
def test_closure_is_called_once_with_gradients_on(entry):
    params = inputs()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        gradients(params, 0)
        return 1.25

    assert entry.build(params).step(closure) == 1.25
    assert calls == [True]


@every_optimizer
def test_asking_for_scales_changes_nothing(entry):
    params = inputs()
    optimizer = entry.build(params)
    assert list(optimizer.scales()) == []
    train(optimizer, params, 3)
    before = snapshot(optimizer, params)
    p, scale = next(optimizer.scales())  # and leaves the iterator standing
    assert torch.is_grad_enabled()
    assert p is params[0]
    assert not scale.requires_grad
    assert len(list(optimizer.scales())) == len(params)
    assert_unchanged(before, snapshot(optimizer, params))


@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.Adam)], ids=["native", "wrapper"])
def test_lazy_parameters_are_saved_and_trained_once_they_exist(build):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyLinear(2))
    optimizer = build(model.parameters(), lr=0.1)
    model[0](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert set(through_a_file(optimizer.state_dict())["state"]) == {0, 1}
    optimizer.load_state_dict(optimizer.state_dict())
    model(torch.ones(2, 3)).sum().backward()
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.Adam)], ids=["native", "wrapper"])
@pytest.mark.parametrize("watched", [False, True])
def test_parameters_that_are_removed_are_freed(build, watched):
    """As in progressive freezing. Reference counts must do, as the garbage collector may come late."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    optimizer = build([{"params": layer.parameters()} for layer in model], lr=0.1)
    monitor = cprop.Monitor(optimizer, model.named_parameters(), every=1) if watched else None
    train(optimizer, list(model.parameters()), 2)
    alive = weakref.ref(model[1].weight), weakref.ref(model[0].weight)
    for p in optimizer.param_groups[1]["params"]:
        del optimizer.state[p]
    del optimizer.param_groups[1], model[1], p
    train(optimizer, list(model.parameters()), 1, start=2)
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True]
    assert monitor is None or set(monitor.samples[-1].layers) == {"0"}


# --- groups ---------------------------------------------------------------------------------------


@every_optimizer
def test_add_param_group_fills_and_takes_settings(entry):
    params = inputs()
    optimizer = entry.build(params[:2], cprop_c=2.0)
    train(optimizer, params[:2], 3)
    optimizer.add_param_group({"params": params[2:4]})
    optimizer.add_param_group({"params": params[4:], "cprop_c": 5.0, "lr": 0.0})
    assert [group["cprop_c"] for group in optimizer.param_groups] == [2.0, 2.0, 5.0]
    before = [p.detach().clone() for p in params]
    try:
        train(optimizer, params, 3, start=3)
    except KeyError:  # in older releases of torch
        assert entry.cls is torch.optim.Adagrad
        pytest.skip("the inner optimizer has no state for a group that was added")
    assert not torch.equal(params[2], before[2])
    assert optimizer.state[params[0]]["cprop_step"] == 6
    assert optimizer.state[params[2]]["cprop_step"] == 3


@every_optimizer
def test_named_parameters(entry):
    model = torch.nn.Linear(3, 2)
    optimizer = entry.build(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, list(model.parameters()), 2)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


# --- copies ---------------------------------------------------------------------------------------


@every_optimizer
def test_deepcopy_goes_on_alone(entry):
    params = inputs()
    optimizer = entry.build(params)
    train(optimizer, params, 5)
    if "Lion" in entry.id:
        pytest.skip("the inner optimizer does not survive deepcopy: torch drops its attributes")
    twin, twin_params = copy.deepcopy((optimizer, params))
    train(optimizer, params, 5, start=5)
    assert not same(params[1:2], twin_params[1:2])
    train(twin, twin_params, 5, start=5)
    assert same(params, twin_params)
    assert twin.param_groups[0]["params"][0] is twin_params[0]


@every_optimizer
def test_pickle_goes_on_as_before(entry):
    if "Lion" in entry.id:
        pytest.skip("the inner optimizer does not survive pickle: torch drops its attributes")
    params = inputs()
    optimizer = entry.build(params)
    train(optimizer, params, 5)
    twin, twin_params = pickle.loads(pickle.dumps((optimizer, params)))
    assert type(twin) is type(optimizer)
    train(optimizer, params, 5, start=5)
    train(twin, twin_params, 5, start=5)
    assert same(params, twin_params)


@pytest.mark.parametrize("copied", ["not", "deepcopy", "pickle", "load", "wrapped again"])
@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.SGD)])
def test_a_copy_knows_which_beta_its_statistics_have(build, copied):
    if copied == "wrapped again" and build is cprop.CPropAdam:
        pytest.skip("it has no inner optimizer")
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = build([p], lr=0.0)
    p.grad = torch.randn(20_000, generator=generator)
    optimizer.step()
    # As after 50,000 steps of noise.
    state = optimizer.state[p]
    for key in {"step", "cprop_step"} & set(state):
        state[key].fill_(50_000)
    state["cprop_m"].copy_(torch.randn(20_000, generator=generator) / 1999**0.5)
    state["cprop_v" if "cprop_v" in state else "exp_avg_sq"].fill_(1.0)
    if copied == "deepcopy":
        optimizer, p = copy.deepcopy((optimizer, p))
    if copied == "pickle":
        optimizer, p = pickle.loads(pickle.dumps((optimizer, p)))
    if copied == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if copied == "wrapped again":
        optimizer = cprop.CProp(optimizer.inner)
    optimizer.param_groups[0]["cprop_beta"] = 0.9999
    p.grad = torch.randn(20_000, generator=generator)
    optimizer.step()
    assert 0.35 < dict(optimizer.scales())[p].mean() < 0.5


# --- hooks, numbers of NumPy, AMP -----------------------------------------------------------------


@every_optimizer
def test_hooks_run_once_each(entry):
    params = inputs()
    optimizer = entry.build(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, s: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda _, s: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    train(optimizer, params, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "save", "saved", "load", "loaded"]


@every_optimizer
def test_hooks_get_the_complete_state_and_may_replace_it(entry):
    params = [p for p in inputs() if p.numel()]
    optimizer = entry.build(params)
    train(optimizer, params[:2], 1)
    expected, seen = optimizer.state_dict(), []
    optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.param_groups[0].update(cprop_c=3.0))
    optimizer.register_state_dict_post_hook(lambda _, s: seen.append(s))
    optimizer.register_state_dict_post_hook(lambda _, s: [*s["state"]])
    assert optimizer.state_dict() == [*expected["state"]]
    assert {i: [*entries] for i, entries in seen[0]["state"].items()} == {
        i: [*entries] for i, entries in expected["state"].items()
    }
    assert seen[0]["param_groups"][0]["cprop_c"] == 3.0


def test_global_hooks_are_called_once_per_step():
    params = inputs()[1:2]
    inner = torch.optim.Adam(params, lr=0.01)
    optimizer = cprop.CProp(inner)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(("before", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(("after", opt))),
        inner.register_step_pre_hook(lambda opt, *_: calls.append(("inner before", opt))),
        inner.register_step_post_hook(lambda opt, *_: calls.append(("inner after", opt))),
    ]
    try:
        train(optimizer, params, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("before", optimizer), ("inner before", inner), ("inner after", inner), ("after", optimizer)]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": np.float32(0.25)},
        {"lr": np.float64(0.25)},
        {"lr": np.int64(0)},
        {"lr": 0.25, "betas": (np.float32(0.5), 0.75)},
        {"cprop_c": np.float32(2.0)},
        {"cprop_beta": np.float64(0.99)},
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.Adam)])
def test_numbers_of_numpy_are_numbers(build, settings):
    ours, theirs = inputs(), inputs()
    optimizer = build(ours)
    optimizer.param_groups[0].update(settings)
    saved = through_a_file(optimizer.state_dict())
    train(optimizer, ours, 3)
    resumed = build(theirs)
    resumed.load_state_dict(saved)
    train(resumed, theirs, 3)
    assert {key: resumed.param_groups[0][key] for key in settings} == settings
    torch.testing.assert_close(ours, theirs)
    optimizer.load_state_dict(resumed.state_dict())  # and back


@every_optimizer
def test_load_hook_may_replace_the_state_dict(entry):
    params = inputs()
    optimizer = entry.build(params)
    train(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _, __: saved)
    optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.state[params[1]]["cprop_step"] == 2


@every_optimizer
def test_grad_scaler_skips_a_step_with_infinite_gradients(entry):
    params = [p for p in inputs() if p.numel()]
    optimizer = entry.build(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        gradients(params, step)
        for p in params:
            p.grad.mul_(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    before = snapshot(optimizer, params)
    gradients(params, 3)
    params[1].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert_unchanged(before, snapshot(optimizer, params))
    assert scaler.get_scale() == 2.0
    gradients(params, 4)
    scaler.step(optimizer)
    assert optimizer.state[params[1]]["cprop_step"] == 4
