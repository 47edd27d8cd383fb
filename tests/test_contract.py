"""What a tool around an optimizer may rely on, over the whole table: each trap of torch.optim is a test."""

import copy
import gc
import inspect
import io
import math
import pickle
import threading
import weakref
from collections import defaultdict
from collections.abc import MutableMapping

import numpy as np
import pytest
import schedulefree
import torch
from table import INNERS, TABLE, Inner, cases, gradients, inputs, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import cprop
from cprop.optimizers.settings import Settings

every_optimizer = pytest.mark.parametrize("entry", cases(TABLE))
every_setting = pytest.mark.parametrize("entry", cases(TABLE, pytest.mark.slow))
every_inner = pytest.mark.parametrize("inner", cases(INNERS))


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


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
def test_parameters_without_gradients_are_left_alone(entry):
    params = inputs()
    optimizer = entry.build(params)
    before = params[1].detach().clone()
    for step in range(3):
        gradients(params, step)
        params[1].grad = None
        optimizer.step()
    assert torch.equal(params[1], before)
    assert optimizer.state.get(params[1], {}).get("cprop_step", 0) == 0
    assert [p is params[1] for p, _ in optimizer.scales()].count(True) == 0
    # It may join later, with a counter of its own.
    train(optimizer, params, 2, start=3)
    assert optimizer.state[params[1]]["cprop_step"] == 2
    assert optimizer.state[params[2]]["cprop_step"] == 5


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


@every_optimizer
def test_a_step_without_any_gradient_does_nothing(entry):
    params = inputs()
    optimizer = entry.build(params)
    optimizer.step()
    assert same(params, inputs())


@every_optimizer
def test_gradients_are_not_written_to_by_us(entry):
    params = inputs()
    gradients(params, 0)
    before = [p.grad.clone() for p in params]
    entry.build(params).step()
    assert same([p.grad for p in params], before)


def inference_gradient(w, x):
    with torch.inference_mode():
        w.grad = x.detach() * 2
    return torch.zeros((), requires_grad=True)


def graph_of_the_gradient(w, x):
    w.grad = x * 2
    return w.grad.square().sum()


def graph_that_saved_the_gradient(w, x):
    w.grad = x.detach() * 2
    return (x * w.grad).sum()


@pytest.mark.parametrize(
    "way", [{}, {"cprop_foreach": True}, {"cprop_fused": True}], ids=["for-loop", "foreach", "fused"]
)
@pytest.mark.parametrize("gradient", [inference_gradient, graph_of_the_gradient, graph_that_saved_the_gradient])
def test_gradients_of_inference_mode_and_of_graphs_are_used_and_left_as_they_are(gradient, way):
    w, x = torch.nn.Parameter(torch.zeros(3)), torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    optimizer = cprop.CProp.around(torch.optim.SGD)([w], lr=0.5, **way)
    y = gradient(w, x)
    optimizer.step()
    y.backward()
    assert torch.equal(w.detach(), -x.detach())
    assert torch.equal(w.grad, x.detach() * 2)
    assert x.grad is None or x.grad.isfinite().all()
    for value in (torch.nan, 1.0):  # replaced, whoever made it
        with torch.inference_mode():
            w.grad = torch.full((3,), value)
        before = w.detach().clone()
        optimizer.step()
        assert torch.equal(w.grad, torch.full((3,), 0.0 if math.isnan(value) else 1.0))
        assert torch.equal(w.detach(), before) == math.isnan(value)


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


@every_inner
def test_wrapper_and_inner_cannot_drift_apart(inner):
    params = inputs()
    optimizer = cprop.CProp(inner.cls(params, **inner.settings))
    train(optimizer, params, 3)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert optimizer.param_groups is optimizer.inner.param_groups
    # The fault that this is about: the learning rate of a loaded optimizer must still be obeyed.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1, start=3)
    if inner.cls is not torch.optim.ASGD:  # it keeps a learning rate of its own in its state
        assert same(params, before)
    # And someone may load the inner optimizer behind the wrapper's back.
    optimizer.inner.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.param_groups is optimizer.inner.param_groups


def test_a_group_that_is_added_to_the_inner_optimizer_gets_the_settings():
    params = inputs()
    optimizer = cprop.CProp(torch.optim.SGD(params[:2], lr=0.1), c=2.0, fused=False)
    optimizer.inner.add_param_group({"params": params[2:], "cprop_beta": 0.9})
    train(optimizer, params, 2)
    added = optimizer.param_groups[1]
    assert (added["cprop_c"], added["cprop_beta"], added["cprop_fused"]) == (2.0, 0.9, False)
    assert optimizer.state[params[3]]["cprop_step"] == 2


def test_a_checkpoint_loaded_into_the_inner_optimizer():
    params = inputs()
    plain = torch.optim.Adam(params, lr=0.5)
    train(plain, params, 3)
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.1))
    optimizer.param_groups[0]["cprop_c"] = 2.0
    train(optimizer, params, 4)
    saved = through_a_file(optimizer.state_dict())
    optimizer.inner.load_state_dict(through_a_file(plain.state_dict()))
    train(optimizer, params, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cprop_c"]) == (0.5, 2.0)
    assert optimizer.state[params[1]]["step"] == 4
    assert optimizer.state[params[1]]["cprop_step"] == 5  # the gradients that it has seen
    # CProp's own checkpoint brings its statistics, which do not stay with the inner optimizer.
    optimizer.inner.load_state_dict(saved)
    assert optimizer.state[params[1]]["cprop_step"] == 4
    assert set(optimizer.inner.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_statistics_that_the_inner_optimizer_rounded_are_refused():
    params = inputs(torch.bfloat16)
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.1))
    train(optimizer, params, 300)
    saved = through_a_file(optimizer.state_dict())
    optimizer.inner.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"into its inner optimizer, Adam, which rounded .* to torch.bfloat16: load"):
        train(optimizer, params, 1)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1)
    assert optimizer.state[params[1]]["cprop_step"] == 301


def test_wrapping_again_continues_with_new_settings():
    params = inputs()
    first = cprop.CProp(torch.optim.SGD([{"params": params, "cprop_eps": 1e-6}], lr=0.1), c=2.0)
    train(first, params, 3)
    second = cprop.CProp(first.inner, c=5.0, measure="logistic")
    group = second.param_groups[0]
    assert (group["cprop_c"], group["cprop_measure"], group["cprop_eps"]) == (5.0, "logistic", 1e-6)
    train(second, params, 1)
    assert second.state[params[1]]["cprop_step"] == 4


def test_a_parameter_that_is_listed_twice_is_observed_and_scaled_once():
    once, twice = inputs()[1:2], inputs()[1:2]
    optimizer = cprop.CProp(torch.optim.SGD(once, lr=0.2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        doubled = cprop.CProp(torch.optim.SGD(twice * 2, lr=0.1))
    train(optimizer, once, 10)
    train(doubled, twice, 10)
    torch.testing.assert_close(once, twice)
    assert doubled.state[twice[0]]["cprop_step"] == 10
    assert dict(doubled.scales())[twice[0]].max() < 1


# --- the state of the wrapper -----------------------------------------------------------------------


def adam_in_a_wrapper():
    params = inputs()
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.01))
    train(optimizer, params[:3], 2)
    return optimizer, params


ADAMS, OURS = ["step", "exp_avg", "exp_avg_sq"], ["cprop_step", "cprop_m", "cprop_v"]


def test_state_is_a_mapping_of_both_parts():
    optimizer, params = adam_in_a_wrapper()
    state = optimizer.state
    assert state is optimizer.state
    assert isinstance(state, MutableMapping)
    assert isinstance(state[params[0]], MutableMapping)
    assert [len(state), bool(state), params[0] in state, params[3] in state] == [3, True, True, False]
    assert [p is q for p, q in zip(state, params, strict=False)] == [True] * 3
    assert list(state[params[0]]) == list(state[params[0]].keys()) == [*ADAMS, *OURS]
    assert list(optimizer.inner.state[params[0]]) == ADAMS
    assert state.get(params[3]) is None
    assert len(state[params[3]]) == 0
    assert params[3] not in state
    with pytest.raises(KeyError, match="cprop_a"):
        state[params[0]]["cprop_a"]
    assert repr(state[params[0]]) == repr({**optimizer.inner.state[params[0]], **dict(state[params[0]])})


def test_what_is_written_to_the_state_goes_where_it_belongs():
    optimizer, params = adam_in_a_wrapper()
    p, q = params[0], params[4]
    optimizer.state[p]["cprop_step"].fill_(7)
    optimizer.state[p].update(tag=1, cprop_note="ours")
    optimizer.state[q]["tag"] = 2
    assert (optimizer.inner.state[p]["tag"], optimizer.inner.state[q]) == (1, {"tag": 2})
    assert "cprop_note" not in optimizer.inner.state[p]
    assert optimizer.state[p].pop("cprop_note") == "ours"
    del optimizer.state[p]["tag"], optimizer.state[q]
    assert q not in optimizer.inner.state
    assert list(optimizer.state[p]) == [*ADAMS, *OURS]
    for each, entries in optimizer.state.items():  # as tools move state to a device
        for key, value in entries.items():
            entries[key] = value
        optimizer.state[each] = {key: copy.copy(value) for key, value in entries.items()}
    train(optimizer, params, 1, start=2)
    assert (optimizer.state[p]["cprop_step"], optimizer.state[p]["step"]) == (8, 3)
    assert optimizer.state.setdefault(params[5], {}) == optimizer.state[params[5]]
    saved = optimizer.state.pop(p)
    assert [*saved] == [*ADAMS, *OURS]
    assert p not in optimizer.inner.state
    train(optimizer, params, 1, start=3)
    assert optimizer.state[p]["cprop_step"] == optimizer.state[p]["step"] == 1


@pytest.mark.parametrize(
    "reset",
    [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
        lambda optimizer: [optimizer.state.popitem() for _ in list(optimizer.state)],
    ],
    ids=["clear", "rebind", "pop", "popitem"],
)
def test_a_reset_of_the_state_resets_both(reset):
    optimizer, params = adam_in_a_wrapper()
    reset(optimizer)
    assert not optimizer.state
    assert not optimizer.inner.state
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["cprop_step"] == optimizer.state[params[0]]["step"] == 1


def test_copies_of_the_state_are_dictionaries():
    optimizer, params = adam_in_a_wrapper()
    for twin, twins in (
        copy.deepcopy((optimizer.state, params)),
        pickle.loads(pickle.dumps((optimizer.state, params))),
        (optimizer.state.copy(), params),
    ):
        assert type(twin) is defaultdict
        assert type(twin[twins[1]]) is dict
        assert list(twin[twins[1]]) == [*ADAMS, *OURS]
    twin = optimizer.state.copy()
    train(optimizer, params, 1, start=2)
    optimizer.state = twin
    train(optimizer, params, 1, start=3)
    assert optimizer.state[params[0]]["cprop_m"] is twin[params[0]]["cprop_m"]
    optimizer.state = optimizer.state  # what a tool does to every optimizer
    assert list(optimizer.state[params[0]]) == [*ADAMS, *OURS]


class StrictSGD(torch.optim.SGD):
    """Initializes its state if that is empty, as a whole and of each parameter."""

    def step(self, closure=None):
        if not self.state:
            self.started = self.__dict__.get("started", 0) + 1
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["steps"] = 0
            self.state[p]["steps"] += 1
            assert list(self.state[p]) == ["steps"]


def test_an_inner_optimizer_sees_its_own_state_only():
    params = inputs()
    optimizer = cprop.CProp(StrictSGD(params))
    optimizer.state[params[1]]["cprop_note"] = 1
    train(optimizer, params, 3)
    assert optimizer.inner.started == 1
    assert next(iter(optimizer.state[params[1]])) == "steps"
    assert optimizer.state[params[1]]["cprop_note"] == 1


def test_a_wrapper_that_was_pickled_when_its_statistics_were_in_the_inner_state():
    optimizer, _ = adam_in_a_wrapper()
    old = {"inner": optimizer.inner, "defaults": optimizer.defaults}
    for p, entries in optimizer.state.copy().items():
        optimizer.inner.state[p] = entries
    del optimizer.inner._cprop
    restored = cprop.CProp.__new__(cprop.CProp)
    restored.__setstate__(pickle.loads(pickle.dumps(old)))
    p = restored.param_groups[0]["params"][0]
    assert list(restored.state[p]) == [*ADAMS, *OURS]
    assert list(restored.inner.state[p]) == ADAMS


@every_inner
def test_inner_optimizer_starts_as_it_would_alone(inner):
    # Many initialise on len(state) == 0: ours must not lie there before.
    ours, theirs = inputs(), inputs()
    optimizer, plain = cprop.CProp(inner.cls(ours, **inner.settings)), inner.cls(theirs, **inner.settings)
    train(optimizer, ours, 2)
    train(plain, theirs, 2)
    for a, b in zip(ours, theirs, strict=True):
        theirs_keys = set(plain.state.get(b, {}))
        assert {key for key in optimizer.state[a] if not key.startswith("cprop_")} == theirs_keys


def test_inner_optimizer_may_be_in_mid_training():
    params = inputs()
    inner = torch.optim.Adam(params, lr=0.01)
    train(inner, params, 10)
    optimizer = cprop.CProp(inner)
    train(optimizer, params, 5, start=10)
    assert optimizer.state[params[1]]["step"] == 15
    assert optimizer.state[params[1]]["cprop_step"] == 5


def test_inner_optimizers_that_write_to_the_gradient_or_drop_it():
    class Rude(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(-100)
            super().step(closure)
            self.zero_grad(set_to_none=True)

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = cprop.CProp(Rude([w], lr=0.01))
    w.grad = torch.full((3,), 2.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["cprop_m"], torch.full((3,), 0.002))


# --- copies and checkpoints -----------------------------------------------------------------------


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


def assert_resumes_to_the_bit(entry, dtype, start):
    params = inputs(dtype)
    optimizer = entry.build(params)
    train(optimizer, params, start)
    saved = through_a_file({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]})
    assert set(saved["optimizer"]) == {"state", "param_groups"}
    fresh = inputs(dtype)
    with torch.no_grad():
        for p, value in zip(fresh, saved["params"], strict=True):
            p.copy_(value)
    resumed = entry.build(fresh)
    resumed.load_state_dict(saved["optimizer"])
    train(optimizer, params, 10, start)
    train(resumed, fresh, 10, start)
    assert same(params, fresh)
    for p, q in zip(params, fresh, strict=True):
        for key in ("cprop_m", "cprop_v", "cprop_step"):
            if key in optimizer.state[p]:
                kept = torch.float64 if key == "cprop_step" else torch.float32  # an exact counter
                assert resumed.state[q][key].dtype == optimizer.state[p][key].dtype == kept
    assert resumed.state[fresh[1]]["cprop_step"] == start + 10


@every_setting
def test_checkpoint_resumes_to_the_bit(entry):
    assert_resumes_to_the_bit(entry, torch.float32, 10)


@pytest.mark.slow
@every_optimizer
def test_checkpoint_resumes_to_the_bit_past_256_steps_which_bfloat16_cannot_count(entry):
    assert_resumes_to_the_bit(entry, torch.bfloat16, 260)


@pytest.mark.filterwarnings("ignore:.* keeps weights in its state")  # decay is nearly all that momentum holds
@every_optimizer
def test_a_checkpoint_keeps_the_eps_it_was_saved_with(entry):
    """Its groups name it: 1e-8, where that was the default. Gradients are so small that it matters."""

    def trained(optimizer, params, steps):
        for step in steps:
            gradients(params, step)
            for p in params:
                p.grad *= 1e-8
            optimizer.step()
        return [p.detach().clone() for p in params], [scale for _, scale in optimizer.scales()]

    ours, theirs, others = inputs(), inputs(), inputs()
    before = entry.build(ours, cprop_eps=1e-8)
    at, _ = trained(before, ours, range(5))
    resumed, anew = entry.build(theirs), entry.build(others)
    for params in (theirs, others):
        for p, value in zip(params, at, strict=True):
            p.data.copy_(value)
    resumed.load_state_dict(through_a_file(before.state_dict()))
    trained(anew, others, range(5))
    assert [group["cprop_eps"] for group in (*resumed.param_groups, *anew.param_groups)] == [1e-8, 0.0]
    for p, value in zip(others, at, strict=True):
        p.data.copy_(value)
    unbroken, scales = trained(before, ours, range(5, 10))
    found, of_resumed = trained(resumed, theirs, range(5, 10))
    assert same(unbroken, found)
    assert same(scales, of_resumed)
    assert not same(scales, trained(anew, others, range(5, 10))[1])


@every_optimizer
def test_loading_does_not_tie_the_optimizer_to_the_checkpoint(entry):
    params = inputs()
    optimizer = entry.build(params)
    train(optimizer, params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    reference = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 3, start=3)
    for i, entries in saved["state"].items():
        for key, value in entries.items():
            if key.startswith("cprop_"):
                assert torch.equal(value, reference["state"][i][key]), key


def test_state_that_is_factored_resumes():
    # Adafactor's row_var is shaped like a weight of one column, and unlike every other weight.
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 1), (8, 1), (8, 1), (2, 24))] for _ in "ab"
    )
    optimizer = cprop.CProp(torch.optim.Adafactor(ours, lr=0.01))
    train(optimizer, ours, 3)
    resumed = cprop.CProp(torch.optim.Adafactor(theirs, lr=0.01))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    train(optimizer, ours, 3, start=3)
    train(resumed, theirs, 3, start=3)
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("build", "off", "on"),
    [
        (lambda ps: cprop.CPropSGD(ps, lr=0.01, momentum=0.9, dampening=0.5), {"momentum": 0}, {"momentum": 0.9}),
        (lambda ps: cprop.CPropAdam(ps, lr=0.01, amsgrad=True), {"amsgrad": False}, {"amsgrad": True}),
        (lambda ps: cprop.CPropAdaBound(ps, lr=0.01, amsbound=True), {"amsbound": False}, {"amsbound": True}),
        (
            lambda ps: cprop.CPropRMSprop(ps, lr=0.01, momentum=0.9, centered=True),
            {"momentum": 0, "centered": False},
            {"momentum": 0.9, "centered": True},
        ),
    ],
    ids=["SGD", "Adam", "AdaBound", "RMSprop"],
)
def test_what_was_switched_off_in_mid_training_resumes_and_may_be_switched_on_again(build, off, on):
    ours, theirs = inputs(), inputs()
    optimizer, resumed = build(ours), build(theirs)
    train(optimizer, ours, 3)
    optimizer.param_groups[0].update(off)
    train(optimizer, ours, 3, start=3)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    for going_on, params in ((optimizer, ours), (resumed, theirs)):
        train(going_on, params, 2, start=6)
        going_on.param_groups[0].update(on)
        train(going_on, params, 2, start=8)
    assert same(ours, theirs)


class NotingSGD(torch.optim.SGD):
    """Keeps what some optimizers keep: a table in its group that fills up, and state that is no parameter's."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.defaults["table"] = [[None, None] for _ in range(3)]
        for group in self.param_groups:
            group.update(table=[[None, None] for _ in range(3)], latest=None)

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["even"] = 1 - self.state["steps"] % 2
        for group in self.param_groups:
            group["table"][self.state["steps"] % 3] = [self.state["steps"], 0.5]
            group["latest"] = "some"
        return super().step(closure)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_an_inner_optimizer_keeps_is_its_own(steps):
    params = inputs()
    optimizer = cprop.CProp(NotingSGD(params))
    train(optimizer, params, steps)
    resumed = cprop.CProp(NotingSGD(inputs()))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert (resumed.state["steps"], resumed.state["even"]) == (steps, steps - 1)
    assert resumed.param_groups[0]["table"] == optimizer.param_groups[0]["table"]
    assert resumed.param_groups[0]["latest"] == "some"
    train(resumed, resumed.param_groups[0]["params"], 1, start=steps)
    assert resumed.state["steps"] == steps + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@every_optimizer
def test_loaded_state_is_laid_out_like_its_parameter(entry, dtype):
    # A kernel takes tensors that fill their memory in one order; others would be run one by one for ever.
    if dtype.is_complex and "Lion" in entry.id:
        pytest.skip("the inner optimizer refuses complex parameters")
    contiguous = [torch.nn.Parameter(p.detach().contiguous()) for p in inputs(dtype)]
    optimizer = entry.build(contiguous)
    train(optimizer, contiguous, 1)
    params = inputs(dtype)
    resumed = entry.build(params)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for p, q in zip(contiguous, params, strict=True):
        native = "CProp-" not in entry.id
        for key, value in resumed.state[q].items():
            if not key.endswith("step") and (native or key.startswith("cprop_")):
                assert value.stride() == q.stride(), key
                assert torch.equal(value, optimizer.state[p][key]), key


@every_optimizer
def test_a_tensor_learning_rate_is_copied_on_load(entry):
    first, second = entry.build(inputs()), entry.build(inputs())
    first.param_groups[0]["lr"] = torch.tensor(0.01)
    second.load_state_dict(first.state_dict())
    first.param_groups[0]["lr"].fill_(0.5)
    assert second.param_groups[0]["lr"] == torch.tensor(0.01)


@every_optimizer
def test_names_of_parameters_stay_on_load(entry):
    model, head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    optimizer = entry.build(model.named_parameters())
    nameless = entry.build(torch.nn.Linear(3, 2).parameters())
    optimizer.load_state_dict(through_a_file(nameless.state_dict()))
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    optimizer.add_param_group({"params": list(head.named_parameters("head"))})
    assert optimizer.param_groups[1]["param_names"] == ["head.weight", "head.bias"]


@every_inner
def test_plain_checkpoint_is_a_warm_start(inner):
    params = inputs()
    plain = inner.cls(params, **inner.settings)
    train(plain, params, 10)
    optimizer = cprop.CProp(inner.cls(params, **inner.settings), c=2.0)
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert optimizer.param_groups[0]["cprop_c"] == 2.0
    for p in params:
        for key, value in plain.state.get(p, {}).items():
            assert torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value))
    train(optimizer, params, 5, start=10)
    assert optimizer.state[params[1]]["cprop_step"] == 5


@pytest.mark.parametrize(
    ("plain", "native"),
    [
        (torch.optim.Adam, cprop.CPropAdam),
        (torch.optim.AdamW, cprop.CPropAdamW),
        (torch.optim.RMSprop, cprop.CPropRMSprop),
    ],
)
def test_natives_start_warm_from_torch_too(plain, native):
    params = inputs()
    torchs = plain(params, lr=0.01)
    train(torchs, params, 100)
    optimizer = native(params, lr=0.5, cprop_c=2.0)
    optimizer.load_state_dict(through_a_file(torchs.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["cprop_c"] == 2.0
    train(optimizer, params, 5, start=100)
    state = optimizer.state[params[1]]
    assert (state["step"], state["cprop_step"]) == (105, 5)
    assert all(torch.all((s >= 0) & (s <= 1)) for _, s in optimizer.scales())


@pytest.mark.parametrize("adam", [torch.optim.Adam, cprop.CPropAdam], ids=lambda cls: cls.__name__)
def test_adamw_decouples_its_decay_whatever_it_starts_from(adam):
    ours, theirs = inputs(), inputs()
    source = adam(ours, lr=0.01, weight_decay=0.1)
    train(source, ours, 10)
    optimizer, reference = cprop.CPropAdamW(ours), torch.optim.AdamW(theirs)
    optimizer.load_state_dict(through_a_file(source.state_dict()))
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    # torch's AdamW, which does likewise, goes on to the same place as ours without scaling.
    optimizer.param_groups[0]["cprop_c"] = math.inf
    reference.load_state_dict(through_a_file(source.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    train(optimizer, ours, 5, start=10)
    train(reference, theirs, 5, start=10)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("cprop_beta", "shared"), [(0.999, True), (0.99, False)])
def test_of_a_warm_start_the_mean_begins_anew_and_a_shared_mean_square_goes_on(cprop_beta, shared):
    params = inputs()
    torchs = torch.optim.Adam(params, lr=0.01)
    train(torchs, params, 100)
    optimizer = cprop.CPropAdam(params, lr=0.01, cprop_beta=cprop_beta)
    optimizer.load_state_dict(through_a_file(torchs.state_dict()))
    gradients(params, 100)
    g = params[1].grad.clone()
    before = torchs.state[params[1]]["exp_avg_sq"].clone()
    optimizer.step()
    state = optimizer.state[params[1]]
    torch.testing.assert_close(state["exp_avg_sq"], 0.999 * before + 0.001 * g * g)
    torch.testing.assert_close(state["cprop_m"], (1 - cprop_beta) * g)
    assert ("cprop_v" in state) == (not shared)
    # One gradient has no variance, and so no standard error, whatever mean square stands beside it.
    for _, scale in optimizer.scales():
        torch.testing.assert_close(scale, torch.ones_like(scale))


def test_native_takes_over_the_wrappers_checkpoint():
    ours, theirs = inputs(), inputs()
    wrapper = cprop.CProp(torch.optim.Adam(theirs, lr=0.01))
    train(wrapper, theirs, 20)
    native = cprop.CPropAdam(ours, lr=0.01)
    native.load_state_dict(through_a_file(wrapper.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            a.copy_(b)
    train(wrapper, theirs, 50, start=20)
    train(native, ours, 50, start=20)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def custom_measure(moments):
    return (moments.m_hat.abs() / (moments.v_hat.sqrt() + 1e-8)).clamp_max(1.0)


@pytest.mark.parametrize(
    "build",
    [lambda ps, m: cprop.CPropAdam(ps, cprop_measure=m), lambda ps, m: cprop.CProp(torch.optim.Adam(ps), measure=m)],
    ids=["native", "wrapper"],
)
def test_callable_measure_is_saved_by_name_and_looked_up_on_load(build):
    params = inputs()
    optimizer = build(params, custom_measure)
    train(optimizer, params, 3)
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["cprop_measure"] == "test_contract.custom_measure"
    resumed = build(inputs(), custom_measure)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["cprop_measure"] is custom_measure
    with pytest.raises(cprop.CheckpointError, match=r"measure 'test_contract\.custom_measure', which is not built in"):
        build(inputs(), "normal").load_state_dict(saved)


class MeasureWithALock:
    """A measure that cannot be copied, as one that logs to a file could not."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, moments):
        with self.lock:
            return custom_measure(moments)


@pytest.mark.parametrize(
    "build",
    [lambda ps, m: cprop.CPropAdam(ps, cprop_measure=m), lambda ps, m: cprop.CProp(torch.optim.Adam(ps), measure=m)],
    ids=["native", "wrapper"],
)
def test_a_measure_that_is_an_object_is_not_copied_on_load(build):
    measure, params = MeasureWithALock(), inputs()
    optimizer = build(params, measure)
    train(optimizer, params, 2)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert optimizer.param_groups[0]["cprop_measure"] is measure
    train(optimizer, params, 1, start=2)


@every_optimizer
def test_dcp_asks_a_fresh_optimizer_for_its_state(entry):
    # It calls step() with zero gradients and lr 0: parameters must not move, let alone become NaN.
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = entry.build(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert same(model.parameters(), before)
    for _, scale in optimizer.scales():
        assert not scale.isnan().any()


@pytest.mark.parametrize("flatten", [False, True])
@every_setting
def test_dcp_state_dict_round_trip(entry, flatten):
    if flatten and "Lion" in entry.id:
        pytest.skip("the inner optimizer adds a group entry, 'step', that a fresh one lacks")
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = torch.nn.Linear(3, 2)
    optimizer = entry.build(model.parameters())
    train(optimizer, list(model.parameters()), 5)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    twin = copy.deepcopy(model)
    resumed = entry.build(twin.parameters())
    set_optimizer_state_dict(twin, resumed, copy.deepcopy(saved), options=options)
    train(optimizer, list(model.parameters()), 5, start=5)
    train(resumed, list(twin.parameters()), 5, start=5)
    assert same(model.parameters(), twin.parameters())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("state"), r"not an optimizer's state_dict: it needs 'state' and 'param_groups'"),
        (
            lambda s: s["param_groups"].append(s["param_groups"][0]),
            r"has 2 param groups and the optimizer has 1: build",
        ),
        (lambda s: s["param_groups"][0]["params"].pop(), r"param group 0 has 5 parameters in the checkpoint and 6"),
        (lambda s: s["state"][1].update(cprop_m=torch.zeros(7)), r"state 'cprop_m' has shape \(7,\) .* \(5,\)"),
        (lambda s: s["state"][1].update(cprop_m="gone"), r"state 'cprop_m' should be a tensor, but has type str"),
        (
            lambda s: s["state"][1].pop("cprop_m"),
            r"has state \['cprop_step'.*\] but not \['cprop_m'\]: it is incomplete",
        ),
        (lambda s: s["param_groups"][0].update(cprop_measure="mine.own"), r"saved with measure 'mine\.own'"),
    ],
)
@pytest.mark.parametrize(
    "build", [lambda ps: cprop.CPropAdam(ps), lambda ps: cprop.CProp(torch.optim.Adam(ps))], ids=["native", "wrapper"]
)
def test_unfit_checkpoint_is_refused_whole(build, spoil, message):
    params = inputs()
    optimizer = build(params)
    train(optimizer, params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, 3, start=3)
    before = snapshot(optimizer, params)
    spoil(saved)
    with pytest.raises(cprop.CheckpointError, match=message):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, snapshot(optimizer, params))


def test_checkpoint_of_another_algorithm_is_refused():
    params = inputs()
    adagrad = torch.optim.Adagrad(params)
    train(adagrad, params, 1)
    with pytest.raises(cprop.CheckpointError, match=r"the checkpoint has no 'betas', which this optimizer needs"):
        cprop.CPropAdam(params).load_state_dict(adagrad.state_dict())


# --- hooks, AMP, refusals -------------------------------------------------------------------------


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


@every_optimizer
def test_sparse_gradients_are_refused_before_anything_moves(entry):
    params = inputs()
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = entry.build([*params, embedding.weight])
    gradients(params, 0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"does not support sparse gradients, .* parameter of shape \(4, 3\) in group 0"
    ):
        optimizer.step()
    assert same(params, inputs())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda ps: cprop.CProp(torch.optim.LBFGS(ps)),
            r"LBFGS evaluates its closure many times .* one gradient per step",
        ),
        (lambda ps: cprop.CProp(ps), r"CProp wraps an optimizer, but got list: write CProp\(torch\.optim\.Adam"),
        (lambda ps: cprop.CProp(cprop.CPropSGD(ps)), r"CPropSGD is already scaled by CProp: wrap the plain optimizer"),
        (lambda ps: cprop.CProp(cprop.CProp(torch.optim.SGD(ps))), r"CProp is already scaled by CProp"),
        (
            lambda ps: cprop.CProp(schedulefree.AdamWScheduleFree(ps)),
            r"AdamWScheduleFree uses different weights for training and evaluation.* wrap the optimizer it is based",
        ),
        (
            lambda ps: cprop.CProp(torch.optim.Adam(ps, differentiable=True)),
            r"Adam has differentiable=True.* set differentiable=False",
        ),
    ],
)
def test_what_cannot_be_wrapped_says_what_to_do(build, message):
    with pytest.raises(TypeError, match=message):
        build(inputs())


# --- a class and keyword arguments ----------------------------------------------------------------


def test_around_is_a_class_that_frameworks_can_keep():
    cls = cprop.CProp.around(torch.optim.AdamW)
    assert cprop.CProp.around(torch.optim.AdamW) is cls
    assert issubclass(cls, cprop.CProp)
    assert pickle.loads(pickle.dumps(cls)) is cls
    optimizer = cls(inputs(), 0.5, weight_decay=0.1, cprop_c=3.0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cprop_c"]) == (0.5, 3.0)


class Derived(cprop.CProp.around(torch.optim.AdamW)):
    """One of a user."""


def test_a_class_derived_from_around_is_pickled_as_itself():
    assert pickle.loads(pickle.dumps(Derived)) is Derived
    optimizer, _ = pickle.loads(pickle.dumps((Derived(inputs()), 0)))
    assert type(optimizer) is Derived


def test_around_shows_the_arguments_of_both():
    names = list(inspect.signature(cprop.CProp.around(torch.optim.Adam)).parameters)
    assert names[: names.index("cprop_beta")] == list(inspect.signature(torch.optim.Adam).parameters)
    assert names[names.index("cprop_beta") :] == [*Settings._fields, "cprop_foreach", "cprop_fused"]
    with pytest.raises(TypeError, match="CPropAdam is already scaled by CProp"):
        cprop.CProp.around(cprop.CPropAdam)(inputs())


@every_inner
def test_around_equals_the_instance(inner: Inner):
    ours, theirs = inputs(), inputs()
    train(cprop.CProp.around(inner.cls)(ours, **inner.settings, cprop_beta=0.99), ours, 20)
    train(cprop.CProp(inner.cls(theirs, **inner.settings), beta=0.99), theirs, 20)
    assert same(ours, theirs)
