"""A ``state_dict``: resumed to the bit, taken over from other optimizers, and if it is damaged, refused whole."""

import copy
import math
import os
import random
import threading

import pytest
import schedulefree
import torch
from table import (
    NATIVE_CLASSES,
    WAYS,
    equal,
    every_build_in_every_way,
    every_inner,
    every_optimizer,
    every_setting,
    every_way,
    gradients,
    inputs,
    same,
    through_a_file,
    train,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import cprop
from cprop import CheckpointError

# --- training goes on to the bit ------------------------------------------------------------------


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


@every_way
def test_schedule_free_around_a_native_resumes_to_the_bit(way):
    def build(params):
        optimizer = schedulefree.ScheduleFreeWrapper(cprop.CPropAdamW(params, lr=0.01, **WAYS[way]))
        optimizer.train()
        return optimizer

    params = inputs()[1:3]
    optimizer = build(params)
    train(optimizer, params, 5)
    fresh = copy.deepcopy(params)
    resumed = build(fresh)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(optimizer, params, 5, start=5)
    train(resumed, fresh, 5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(params, fresh, strict=True))


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
    assert saved["param_groups"][0]["cprop_measure"] == "test_checkpoints.custom_measure"
    resumed = build(inputs(), custom_measure)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["cprop_measure"] is custom_measure
    with pytest.raises(
        cprop.CheckpointError, match=r"measure 'test_checkpoints\.custom_measure', which is not built in"
    ):
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


# --- the state of other optimizers, and of other tools --------------------------------------------


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


@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam], ids=lambda cls: cls.__name__)
def test_back_to_plain_torch_with_a_layer_that_had_no_gradient(inner):
    params = inputs()
    optimizer = cprop.CProp(inner(params, lr=0.01))
    train(optimizer, params[:3], 3)
    plain = inner(params, lr=0.01)
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    train(plain, params, 2, start=3)
    assert all(torch.isfinite(p).all() for p in params)


@every_build_in_every_way
def test_foreign_state_is_left_alone_and_carried_along(build, way):
    if way == "fused" and build not in NATIVE_CLASSES:
        way = "foreach"  # torch's fused Adam wants its own state alone
    ours, theirs = inputs(), inputs()
    optimizer, plain = build(ours, lr=0.01, **WAYS[way]), build(theirs, lr=0.01, **WAYS[way])
    foreign = {"tag": 7, "notes": [1, 2], "scalar": torch.tensor(3.0), "history": torch.arange(5)}
    for step in range(4):
        for p in ours:
            optimizer.state[p].update(foreign if step else {})
        train(optimizer, ours, 1, start=step)
        train(plain, theirs, 1, start=step)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(list(optimizer.scales())) == len(ours)
    fresh = copy.deepcopy(ours)
    resumed = build(fresh, lr=0.01, **WAYS[way])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    loaded = resumed.state[fresh[1]]
    assert (loaded["tag"], loaded["notes"]) == (7, [1, 2])
    assert loaded["scalar"] == 3
    assert torch.equal(loaded["history"], foreign["history"])
    assert loaded["history"].data_ptr() != foreign["history"].data_ptr()


def test_foreign_state_of_a_parameter_without_gradient_is_carried_along():
    params = inputs()[1:3]
    optimizer = cprop.CPropAdam(params, lr=0.01)
    optimizer.state[params[1]]["tag"] = 7
    train(optimizer, params[:1], 1)
    saved = through_a_file(optimizer.state_dict())
    assert {"cprop_step", "exp_avg", "tag"} <= saved["state"][1].keys()  # complete, as checkpoint libraries want it
    fresh = copy.deepcopy(params)
    resumed = cprop.CPropAdam(fresh, lr=0.01)
    resumed.load_state_dict(saved)
    assert resumed.state[fresh[1]] == {"tag": 7}


def test_state_of_another_optimizer_alone_is_refused():
    params = inputs()[1:3]
    sgd = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    train(sgd, params, 1)
    saved = sgd.state_dict()
    saved["param_groups"][0].update(betas=(0.9, 0.999), eps=1e-8)
    with pytest.raises(cprop.CheckpointError, match=r"has state \['momentum_buffer'\], and none of CPropAdam's state"):
        cprop.CPropAdam(params).load_state_dict(saved)


@pytest.mark.parametrize(
    ("saved", "loads", "missing"),
    [
        (torch.optim.AdamW, cprop.CProp.around(torch.optim.SGD), "'momentum', 'dampening'"),
        (torch.optim.SGD, cprop.CProp.around(torch.optim.AdamW), "'betas', 'eps'"),
        (cprop.CProp.around(torch.optim.AdamW), cprop.CProp.around(torch.optim.SGD), "'momentum', 'dampening'"),
        (cprop.CPropAdam, cprop.CPropSGD, "'momentum', 'dampening'"),
        (cprop.CPropSGD, cprop.CPropRMSprop, "'alpha', 'eps'"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_checkpoint_of_another_algorithm_is_refused(saved, loads, missing):
    params = inputs()
    optimizer = saved(params, lr=0.123)
    train(optimizer, params, 2)
    other = loads(params, lr=0.01)
    with pytest.raises(
        cprop.CheckpointError, match=rf"group 0 of the checkpoint has no {missing}, which this optimizer"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.01


# --- torch.distributed.checkpoint -----------------------------------------------------------------


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


# --- damage ---------------------------------------------------------------------------------------


OPTIMIZERS = {
    "CPropAdam": lambda ps: cprop.CPropAdam(ps, lr=0.01),
    "CPropSGD": lambda ps: cprop.CPropSGD(ps, lr=0.01, momentum=0.9),
    "CPropRMSprop": lambda ps: cprop.CPropRMSprop(ps, lr=0.01),
    "CPropAdaBound": lambda ps: cprop.CPropAdaBound(ps, lr=0.01),
    "CProp(SGD)": lambda ps: cprop.CProp(torch.optim.SGD(ps, lr=0.01, momentum=0.9)),
    "CProp(AdamW)": lambda ps: cprop.CProp(torch.optim.AdamW(ps, lr=0.01)),
}


def trained(name, steps=3):
    params = inputs()
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, steps)
    return params, optimizer


@pytest.mark.parametrize(
    "error", [MemoryError("out of memory"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr
)
@pytest.mark.parametrize("name", ["CPropAdam", "CProp(AdamW)"])
def test_running_out_of_memory_is_not_called_damage(name, error):
    def run_out(*_):
        raise error

    _, optimizer = trained(name)
    optimizer.register_load_state_dict_pre_hook(run_out)
    with pytest.raises(type(error), match="out of memory"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_running_out_of_a_cpus_memory_is_not_called_damage():
    p = torch.nn.Parameter(torch.zeros(()).expand(1 << 50))  # one number; its state would be four petabytes
    optimizer = cprop.CPropSGD([p], lr=0.01)
    state = {"cprop_step": 1.0, "cprop_m": p.detach(), "cprop_v": p.detach()}
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})


REPLACEMENTS = [
    None, True, -1, 0, 3, 0.5, -0.1, float("nan"), float("inf"), 1e30, "", "normal", b"x", [], {}, (), (0.9,),
    [1, 2, 3], (0.9, "x"), {"a": 1}, object(), len, torch.zeros(0), torch.zeros(3), torch.tensor(2.0),
    torch.zeros(4, 3), torch.ones(5, dtype=torch.int64), torch.zeros(5, dtype=torch.bool), torch.full((5,), torch.nan),
    torch.zeros(1, 5),
]  # fmt: skip


def places(x, path=()):
    """Every place in nested dictionaries and lists, by path."""
    yield path
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutate(x, path, change):
    """A copy with a change at one place."""
    if not path:
        return change(x)
    key, *rest = path
    if isinstance(x, dict):
        changed = dict(x)
        value = mutate(x[key], rest, change)
        if value is REMOVED:
            del changed[key]
        elif isinstance(value, Renamed):
            changed[value.key] = changed.pop(key)
        else:
            changed[key] = value
        return changed
    values = list(x)
    value = mutate(x[key], rest, change)
    if value is REMOVED:
        del values[key]
    else:
        values[key] = x[key] if isinstance(value, Renamed) else value
    return type(x)(values)


REMOVED = object()


class Renamed:
    def __init__(self, key):
        self.key = key


def mutations(state_dict, rng):
    path = rng.choice(list(places(state_dict)))
    kind = rng.randrange(4)
    if kind == 0 and path:
        return mutate(state_dict, path, lambda _: REMOVED)
    if kind == 1 and path:
        return mutate(
            state_dict, path, lambda _: Renamed(rng.choice([0, 1, 99, "step", "exp_avg", "cprop_m", None, ()]))
        )
    return mutate(state_dict, path, lambda _: rng.choice(REPLACEMENTS))


def snapshot(optimizer):
    return copy.deepcopy([optimizer.state_dict(), [dict(s) for s in optimizer.state.values()]])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mutated_state_dicts_load_or_are_refused_whole(name):
    """Each one loads, or raises our error and changes nothing.

    Our own optimizers can be stepped then; what an inner one makes of its state is its own.
    """
    count = int(os.environ.get("CPROP_FUZZ", 600)) // len(OPTIMIZERS) + 1
    rng = random.Random(name)
    params, source = trained(name)
    state_dict = source.state_dict()
    params, optimizer = trained(name, 2)
    refused = loaded = 0
    before = snapshot(optimizer)
    for _ in range(count):
        mutated = state_dict
        for _ in range(rng.choice((1, 1, 2))):
            mutated = mutations(mutated, rng)
        try:
            optimizer.load_state_dict(mutated)
        except CheckpointError:
            refused += 1
            if refused % 10 == 0:
                assert equal(snapshot(optimizer), before)
        else:
            loaded += 1
            if not name.startswith("CProp("):
                gradients(params, 0)
                optimizer.step()
            params, optimizer = trained(name, 2)
    assert equal(snapshot(optimizer), before)
    assert refused > count / 3
    assert loaded > count / 100


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sd: sd["state"][1].update(cprop_m=torch.zeros(7)), r"'cprop_m' has shape \(7,\) .* should have \(5,\)"),
        (lambda sd: sd["state"][1].update(cprop_m="x"), "'cprop_m' should be a tensor, but has type str"),
        (lambda sd: sd["state"][1].update(cprop_m=torch.zeros(5).int()), "should be floating-point or complex"),
        (lambda sd: sd["state"][1].update(cprop_step=-2), "'cprop_step' is -2.0, which is not a valid number"),
        (lambda sd: sd["state"][1].pop("cprop_m"), r"but not \['cprop_m'\]: it is incomplete"),
        (lambda sd: sd["param_groups"][0].update(lr="fast"), "'lr' of param group 0 is 'fast' in the checkpoint"),
        (lambda sd: sd["param_groups"][0].update(cprop_beta=1.5), "invalid cprop_beta 1.5"),
        (lambda sd: sd["param_groups"][0]["params"].pop(), "has 5 parameters in the checkpoint and 6 in the optimizer"),
        (
            lambda sd: sd["param_groups"].append(sd["param_groups"][0]),
            "has 2 param groups and the optimizer has 1: build",
        ),
        (lambda sd: sd["param_groups"][0].update(cprop_measure="mine.own"), r"saved with measure 'mine\.own'"),
        (lambda sd: sd["state"].update({1: 3}), "the state of parameter 1 is not a dictionary"),
        (lambda sd: sd.pop("state"), "this is not an optimizer's state_dict"),
    ],
)
def test_what_is_wrong_is_said(name, damage, message):
    _, optimizer = trained(name)
    before = snapshot(optimizer)
    state_dict = copy.deepcopy(optimizer.state_dict())
    damage(state_dict)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state_dict)
    assert equal(snapshot(optimizer), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_one_number_is_not_broadcast(name):
    _, optimizer = trained(name)
    for key, value in optimizer.state_dict()["state"][1].items():
        if not key.endswith("step") and (key.startswith("cprop_") or not name.startswith("CProp(")):
            assert value.shape == (5,)
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["state"][1][key] = torch.zeros(1)
            with pytest.raises(CheckpointError, match=rf"'{key}' has shape \(1,\) .* should have \(5,\)"):
                optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("CProp(")])
@pytest.mark.parametrize("damage", [{"weight_decay": "much"}, {"cprop_c": None}, {"maximize": [1]}])
def test_settings_of_an_inner_optimizer_that_torch_names_are_checked(name, damage):
    _, optimizer = trained(name)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0].update(damage)
    with pytest.raises(CheckpointError, match=rf"'{next(iter(damage))}' of param group 0 is"):
        optimizer.load_state_dict(state_dict)
