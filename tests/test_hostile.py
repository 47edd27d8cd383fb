"""What broke under hostile use: other tools' state, other algorithms' checkpoints, huge numbers, threads, edits."""

import copy
import dataclasses
import gc
import io
import logging
import math
import os
import re
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import pytorch_optimizer
import schedulefree
import torch
from table import gradients, inputs, train
from test_execution import WAYS
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import cprop

NATIVES = [cprop.CPropSGD, cprop.CPropAdam, cprop.CPropAdamW, cprop.CPropRMSprop, cprop.CPropAdaBound]
BUILDS = [*NATIVES, cprop.CProp.around(torch.optim.Adam)]
every_way = pytest.mark.parametrize("way", WAYS)
every_build = pytest.mark.parametrize("build", BUILDS, ids=lambda cls: cls.__name__)
# Compiled, one native stands for the others: each of them is another kernel.
every_build_in_every_way = pytest.mark.parametrize(
    ("build", "way"),
    [
        pytest.param(build, way, id=f"{build.__name__}-{way}", marks=pytest.mark.nightly if repeats else ())
        for build in BUILDS
        for way in WAYS
        for repeats in [way == "fused" and build in NATIVES and build is not cprop.CPropAdam]
    ],
)


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# State of other tools beside ours.


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


@every_build_in_every_way
def test_foreign_state_is_left_alone_and_carried_along(build, way):
    if way == "fused" and not issubclass(build, tuple(NATIVES)):
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


# What cannot be wrapped, and what is to no purpose.


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def test_what_has_no_ordinary_state_dict_is_refused():
    lookahead = pytorch_optimizer.Lookahead(torch.optim.SGD(linear().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Lookahead.state_dict\(\) has \[.*\] instead of 'state' and 'param_groups'"):
        cprop.CProp(lookahead)


def test_the_loss_of_a_closure_reaches_the_inner_optimizer():
    model = linear()
    optimizer = cprop.CProp(pytorch_optimizer.AliG(model.parameters(), max_lr=0.1))
    inputs_ = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(inputs_).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(20):
        optimizer.step(closure)
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]


def test_sam_goes_around_cprop_and_not_inside_it():
    model = linear()

    def closure():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    closure()
    around = cprop.CProp(pytorch_optimizer.SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.1))
    with pytest.raises(
        RuntimeError, match=r"wrap its base optimizer instead, as in SAM\(params, base_optimizer=CProp\.around\("
    ):
        around.step(closure)
    model = linear()
    inside = pytorch_optimizer.SAM(model.parameters(), base_optimizer=cprop.CProp.around(torch.optim.Adam), lr=0.1)
    first = closure().item()
    for _ in range(10):
        inside.step(closure)
    assert closure().item() < 0.5 * first
    assert all("cprop_m" in state for state in inside.base_optimizer.state.values())


def test_weights_kept_in_the_state_are_warned_of_once():
    params = inputs()[1:3]
    optimizer = cprop.CProp(pytorch_optimizer.MADGRAD(params, lr=0.01))
    with pytest.warns(UserWarning, match=r"MADGRAD keeps weights in its state \('x0'\), which CProp does not scale"):
        train(optimizer, params, 1)
    train(optimizer, params, 2, start=1)  # warnings are errors here


def test_ordinary_optimizers_are_not_warned_of():
    for cls in (torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.RMSprop):
        params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4)), *inputs()]
        train(cprop.CProp(cls(params, lr=0.01)), params, 1)


L2 = {"weight_decay": 0.01}


@pytest.mark.parametrize("size", [0.0, 1e-9])
@pytest.mark.parametrize(
    ("inner", "settings", "warns"),
    [
        (torch.optim.SGD, {"momentum": 0.9, **L2}, False),
        (torch.optim.Adam, L2, False),
        (torch.optim.NAdam, L2, False),
        (torch.optim.RMSprop, {"momentum": 0.9, **L2}, False),
        (pytorch_optimizer.AdaBelief, {}, False),  # its state is constant then
        (pytorch_optimizer.MARS, {}, False),  # it has another name for its weight decay
        (torch.optim.ASGD, L2, True),
        (pytorch_optimizer.MADGRAD, L2, True),
        (pytorch_optimizer.Ranger, L2, True),  # Lookahead
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_layer_whose_first_gradient_is_zero_tells_weights_from_their_decay(inner, settings, warns, size, recwarn):
    """As behind a zero-initialized head, and in the A of LoRA: then SGD's momentum is the L2 term alone."""
    warnings.simplefilter("always")
    w = torch.nn.Parameter(inputs()[4].detach().clone())
    gradients([w], 0)
    w.grad.mul_(size)
    cprop.CProp(inner([w], lr=1e-3, **settings)).step()
    assert any("keeps weights in its state" in str(w.message) for w in recwarn) == warns


class Quantized(torch.Tensor):
    """Supports no operation at all, as torchao's state supports few."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_state_of_any_kind_stops_no_step_and_leaves_no_weight_unscaled():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            w = self.param_groups[0]["params"][0]
            self.state[w]["quantized"] = Quantized(w)

    ours, theirs = inputs()[2:3], inputs()[2:3]
    train(cprop.CProp(Odd(ours, lr=0.1), c=0.5), ours, 1)
    train(cprop.CProp(torch.optim.SGD(theirs, lr=0.1), c=0.5), theirs, 1)
    assert torch.equal(*ours, *theirs)


# Checkpoints of another algorithm, and back to plain torch.


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


@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam], ids=lambda cls: cls.__name__)
def test_back_to_plain_torch_with_a_layer_that_had_no_gradient(inner):
    params = inputs()
    optimizer = cprop.CProp(inner(params, lr=0.01))
    train(optimizer, params[:3], 3)
    plain = inner(params, lr=0.01)
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    train(plain, params, 2, start=3)
    assert all(torch.isfinite(p).all() for p in params)


# Numbers at the edge.


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


@every_build_in_every_way
@pytest.mark.parametrize("huge", [1e18, 1e19, 3e38])
def test_gradients_whose_square_overflows_count_as_zero_and_leave_no_trace(build, huge, way):
    ours, theirs = inputs()[1:3], inputs()[1:3]
    optimizer, clean = build(ours, lr=0.01, **WAYS[way]), build(theirs, lr=0.01, **WAYS[way])
    for step in range(4):
        for params, each, bad in ((ours, optimizer, huge), (theirs, clean, huge if huge < 1.1e18 else 0.0)):
            gradients(params, step)
            params[0].grad[step] = bad
            each.step()
    assert all(torch.isfinite(p).all() for p in ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_way
def test_bfloat16_parameters_keep_the_scale_of_a_move_of_one_unit(way):
    """To the nearest, three tenths of a unit are none: with c = 0.3 nothing would ever move."""
    start = torch.arange(107 << 7, 147 << 7, dtype=torch.int16).view(torch.bfloat16)  # all from 2^-20 to 2^20
    unit = 2.0 ** (start.float().log2().floor() - 7)
    w = torch.nn.Parameter(start.clone())
    optimizer = cprop.CProp(torch.optim.SGD([w], lr=1.0), c=0.3, **WAYS[way])
    for _ in range(10):
        w.grad = unit.bfloat16()
        optimizer.step()
    assert ((start.float() - w.detach().float()) / unit).mean().item() == pytest.approx(10 * 0.3, rel=0.03)


def test_bfloat16_parameters_at_scale_one_are_the_inner_optimizers_to_the_bit():
    ours, theirs = inputs(torch.bfloat16), inputs(torch.bfloat16)
    train(cprop.CProp(torch.optim.Adam(ours, lr=0.01), c=math.inf), ours, 20)
    train(torch.optim.Adam(theirs, lr=0.01), theirs, 20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Settings that are edited in mid-training.


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


@every_build_in_every_way
def test_data_that_was_transposed_is_refused(build, way):
    w = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = build([w], lr=0.01, **WAYS[way])
    train(optimizer, [w], 1)
    w.data = w.data.t().contiguous()
    gradients([w], 1)
    with pytest.raises(RuntimeError, match=r"differ in shape \(.*\(5, 3\).*cprop_m \(3, 5\).*build a new optimizer"):
        optimizer.step()


# Around the step: hooks, loggers, threads, compilers, measures.


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


def test_a_raising_logger_does_not_end_the_training(caplog):
    params = inputs()[1:2]
    optimizer = cprop.CPropAdam(params, lr=0.01)
    kept = []
    monitor = cprop.Monitor(optimizer, every=1, sinks=[lambda sample: 1 / 0, kept.append])
    with caplog.at_level(logging.WARNING, "cprop"):
        train(optimizer, params, 3)
    assert len(kept) == len(monitor.samples) == 3
    (record,) = caplog.records
    assert "a sink of cprop.Monitor failed; training continues" in record.getMessage()
    assert "ZeroDivisionError" in record.exc_text


@dataclasses.dataclass  # not frozen, so it cannot be hashed
class Threshold:
    value: float

    def __call__(self, moments):
        return (moments.z > self.value).float()


@every_way
def test_a_measure_may_be_a_dataclass(way):
    ours, theirs = inputs(), inputs()
    train(cprop.CPropSGD(ours, lr=0.01, cprop_measure=Threshold(1.0), **WAYS[way]), ours, 5)
    train(cprop.CPropSGD(theirs, lr=0.01, cprop_measure=lambda m: (m.z > 1.0).float()), theirs, 5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


class Model(torch.nn.Module):
    def measure(self, moments):
        return moments.z.clamp(max=1.0)


@pytest.mark.slow
def test_a_kernel_does_not_keep_the_object_of_its_measure_alive():
    model = Model()
    params = inputs()[1:2]
    optimizer = cprop.CPropSGD(params, lr=0.01, fused=True, cprop_measure=model.measure)
    cprop.Monitor(optimizer, every=1)
    train(optimizer, params, 2)
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_the_monitor_sums_gradients_of_any_size():
    w = torch.nn.Parameter(torch.zeros(1000))
    for way in WAYS.values():
        optimizer = cprop.CPropSGD([w], lr=0.0, **way)
        monitor = cprop.Monitor(optimizer)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            w.grad = 1e17 * torch.randn(1000, generator=generator)
            optimizer.step()
        total = monitor.sample().total
        assert math.isfinite(total.signal_error)
        assert math.isfinite(total.noise)
        assert total.signal_error > 0


THREADS = """
import torch, cprop
from concurrent.futures import ThreadPoolExecutor

def steps(dtype):
    w = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = cprop.CPropAdam([w], lr=0.01, fused=True)
    for step in range(3):
        w.grad = torch.linspace(-1, 1, 64, dtype=dtype) * (-1) ** step
        optimizer.step()
    return w.detach()

dtypes = [torch.float32, torch.float64] * 2
with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(steps, dtypes))
for dtype, result in zip(dtypes, results):
    assert torch.equal(result, steps(dtype)), dtype
# In float64 nothing is approximated, whatever was compiled meanwhile.
w = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
optimizer = cprop.CPropSGD([w], lr=0.0)
for seed in range(5):
    w.grad = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
((_, scale),) = optimizer.scales()
((_, _, moments),) = optimizer.moments()
assert torch.equal(scale, torch.erf(moments.z * 0.5 ** 0.5))
"""


@pytest.mark.slow
def test_two_threads_may_compile_at_once(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    code = [sys.executable, "-c", THREADS]
    result = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr


RETRY = """
import os, shutil, sys, torch, cprop
w = torch.nn.Parameter(torch.ones(8))
optimizer = {build}
if sys.argv[1] == "cache":  # the folder for kernels becomes a file
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    shutil.rmtree(cache, ignore_errors=True)
    open(cache, "w").close()
w.grad = torch.ones(8)
try:
    optimizer.step()
except RuntimeError as error:
    print(str(error).splitlines()[0])
assert torch.equal(w, torch.ones(8)), "moved"
assert all(float(state[key]) == 0 for state in optimizer.state.values() for key in state if "step" in key), "counted"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "missing", "message"),
    [
        (
            "cprop.CPropAdam([w], fused=True)",
            "compiler",
            "none works here: install one .* CXX to yours, or set fused=False",
        ),
        (
            "cprop.CProp(torch.optim.SGD([w], lr=0.1), fused=True)",
            "cache",
            "cannot write to its folder .* TORCHINDUCTOR_CACHE_DIR to a writable folder, or set fused=False",
        ),
    ],
)
def test_without_a_compiler_or_a_cache_the_remedy_is_named_and_nothing_counted(build, missing, message, tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    if missing == "compiler":
        environment["CXX"] = "/no/such/compiler"
    code = [sys.executable, "-c", RETRY.format(build=build), missing]
    result = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert re.search(message, line), line


# Names that are easily confused.


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
    with pytest.raises(TypeError, match=r"CProp wraps an optimizer, but got list: write CProp\(torch.optim.Adam\("):
        cprop.CProp(params)
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\) instead of model.parameters\(\)"):
        cprop.Monitor(cprop.CPropAdam(params), params)
