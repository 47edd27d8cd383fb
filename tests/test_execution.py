"""One rule, three ways to run it: the same numbers, no recompilation, no host synchronisation."""

import copy
import dataclasses
import gc
import math
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from table import (
    DEVICE,
    INNERS,
    NATIVE_CLASSES,
    NATIVES,
    TABLE,
    WAYS,
    cases,
    every_build_in_every_way,
    every_way,
    gradients,
    inputs,
    prefixed,
    train,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cprop
from cprop.conformity import overconfident
from cprop.execution import choice, for_loop, foreach, kernels
from cprop.execution.foreach import TensorList
from cprop.execution.inductor import traced, vector
from cprop.measures import nearly_normal
from cprop.optimizers import wrapper
from cprop.optimizers.native import COLUMNS
from cprop.statistics import statistics_scalars
from cprop.storage import FORMATS

IN_KERNELS = kernels.measure_in_kernels("normal", torch.device(DEVICE), torch.float32)
"""The formula that fused kernels have for the default measure."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize("measure", ["normal", pytest.param("moment_rate", marks=pytest.mark.nightly)])
def test_by_default_learning_does_not_stop_however_small_gradients_are(way, state_dtype, measure):
    """The scale does not depend on their size; where float32 squares vanish it is one, as without CProp."""

    def scales(size):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(200, device=DEVICE))
        settings = {"cprop_state_dtype": state_dtype, "cprop_measure": measure}
        optimizer = cprop.CPropSGD([p], lr=0.1, **settings, **WAYS[way])
        for _ in range(60):
            p.grad = size * (torch.randn(200, generator=generator) + torch.linspace(0, 1, 200)).to(DEVICE)
            optimizer.step()
        ((_, scale),) = optimizer.scales()
        return scale

    usual = scales(1.0)
    assert usual.mean() < 0.95
    for size in (2.0**-30, 2.0**-50):  # 1e-9 and 1e-15
        if state_dtype == "float32":
            torch.testing.assert_close(scales(size), usual, atol=1e-5, rtol=0)
        else:  # rounded by other random bits
            assert abs(scales(size).mean() - usual.mean()) < 0.05
    torch.testing.assert_close(scales(2.0**-90), torch.ones_like(usual), atol=1e-4, rtol=0)


@pytest.mark.parametrize("entry", cases(TABLE, pytest.mark.slow))
def test_foreach_agrees_with_the_for_loop(entry):
    ours, theirs = inputs(), inputs()
    train(entry.build(ours, **prefixed(entry, WAYS["foreach"])), ours, 60)
    train(entry.build(theirs), theirs, 60)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("entry", cases(TABLE))
def test_fused_agrees_with_the_for_loop(entry):
    """Within 1e-6 after 60 steps, up to what the rounding of the parameter itself adds in float32.

    A kernel contracts multiply-adds. Its approximation of the normal distribution has a test of its own.
    """
    ours, theirs = inputs(), inputs()
    train(entry.build(ours, **prefixed(entry, WAYS["fused"])), ours, 60)
    train(entry.build(theirs, cprop_measure=IN_KERNELS), theirs, 60)
    errors = torch.cat([((a - b) / (1 + a.abs())).detach().flatten() for a, b in zip(ours, theirs, strict=True)])
    assert errors.square().mean().sqrt() < 1e-6
    assert errors.abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("entry", cases([e for e in TABLE if e.cls.__module__.startswith("cprop")]))
def test_a_kernel_gives_a_part_what_it_gives_the_whole(entry):
    """To the bit, wherever a tensor is cut. Sharding rests on it, and compilers treat a loop's last elements apart."""

    def trained(*parts):
        normal = torch.Generator().manual_seed(0)
        params = [p.clone().requires_grad_() for p in torch.randn(91, generator=normal).to(DEVICE).split(parts)]
        optimizer = entry.build(params, fused=True)
        for _ in range(8):
            for p, grad in zip(params, torch.randn(91, generator=normal).to(DEVICE).split(parts), strict=True):
                p.grad = grad
            optimizer.step()
        return torch.cat(params)

    whole = trained(91)
    for cut in (1, 16, 49, 80):
        assert torch.equal(trained(cut, 91 - cut), whole)


@pytest.mark.slow
def test_kernels_add_products_of_integers_exactly():
    def run(x, y, numbers):
        x.copy_(x * y + y * y)
        return ()

    example = [vector(torch.device("cpu"), torch.int64).zero_() for _ in range(2)]
    x, y, numbers = torch.tensor([2**40 + 1]), torch.tensor([3]), torch.zeros(1)
    traced(run, [*example, numbers], threads=1)(x, y, numbers)
    assert x.item() == (2**40 + 1) * 3 + 9


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        pytest.param(torch.float32, "foreach", id="float32-foreach"),
        pytest.param(torch.bfloat16, "foreach", id="bfloat16-foreach"),
        pytest.param(torch.float32, "fused", id="float32-fused"),
        pytest.param(torch.bfloat16, "fused", id="bfloat16-fused", marks=pytest.mark.nightly),  # but for those below
    ],
)
@pytest.mark.parametrize("entry", cases(TABLE))
def test_each_way_resumes_to_the_bit(entry, dtype, way):
    assert_resumes_to_the_bit(entry, dtype, way)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in TABLE if e.id in ("CPropAdam", "CProp-SGD")], ids=lambda entry: entry.id)
def test_kernels_for_bfloat16_resume_to_the_bit(entry):
    assert_resumes_to_the_bit(entry, torch.bfloat16, "fused")


def assert_resumes_to_the_bit(entry, dtype, way):
    params = inputs(dtype)
    flags = prefixed(entry, WAYS[way])
    optimizer = entry.build(params, **flags)
    train(optimizer, params, 10)
    resumed_params = copy.deepcopy(params)
    resumed = entry.build(resumed_params, **flags)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, 10, start=10)
    train(resumed, resumed_params, 10, start=10)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))


@pytest.mark.parametrize("measure", cprop.MEASURES)
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_every_measure_in_every_way(measure, way):
    ours, theirs = inputs(), inputs()
    train(cprop.CPropAdam(ours, lr=0.01, cprop_measure=measure, **WAYS[way]), ours, 50)
    train(cprop.CPropAdam(theirs, lr=0.01, cprop_measure=measure), theirs, 50)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_large_tensors_are_worked_in_blocks_and_layouts_are_kept(way):
    def params():
        generator = torch.Generator().manual_seed(0)
        tensors = [
            torch.randn(700, 500, generator=generator),
            torch.randn(500, 700, generator=generator).t(),
            torch.randn(8, 16, 40, 40, generator=generator).to(memory_format=torch.channels_last),
            torch.randn(3, generator=generator),
        ]
        return [torch.nn.Parameter(tensor) for tensor in tensors]

    ours, theirs = params(), params()
    optimizer = cprop.CPropAdam(ours, lr=0.01, **WAYS[way])
    plain = cprop.CPropAdam(theirs, lr=0.01)
    for step in range(5):
        for opt, ps in ((optimizer, ours), (plain, theirs)):
            gradients(ps, step)
            ps[0].grad = ps[0].grad.t().contiguous().t()  # a gradient laid out unlike its parameter
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("native", "way"),
    [
        *(pytest.param(n, "foreach", id=f"{n.id}-foreach") for n in (NATIVES[0], NATIVES[7], NATIVES[16])),
        pytest.param(NATIVES[7], "fused", id=f"{NATIVES[7].id}-fused"),
        *(pytest.param(n, "fused", id=f"{n.id}-fused", marks=pytest.mark.nightly) for n in (NATIVES[0], NATIVES[16])),
    ],
)
def test_infinite_c_is_torchs_optimizer_in_every_way(native, way):
    ours, theirs = inputs(), inputs()
    train(native.cls(ours, **native.settings, cprop_c=math.inf, **WAYS[way]), ours, 50)
    train(native.plain(theirs, **native.settings), theirs, 50)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-6)


def test_the_normal_measure_of_kernels_is_within_1e4():
    z = torch.cat([torch.linspace(0, 8, 200_001), torch.logspace(1, 30, 100)])
    scale = overconfident(nearly_normal(z), 1.0)
    assert (scale.double() - torch.erf(z.double() / math.sqrt(2))).abs().max() < 1e-4
    assert scale.min() >= 0
    assert (scale[z > 4.1] == 1).all()


def compilations():
    from torch._dynamo.utils import counters  # here, because this import takes a second

    return counters["aot_autograd"]["total"], counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda ps: cprop.CPropAdam(ps, lr=0.01, fused=True),
        lambda ps: cprop.CPropSGD(ps, lr=0.01, momentum=0.9, fused=True),
        lambda ps: cprop.CProp(torch.optim.Adam(ps, lr=0.01, fused=True)),
    ],
    ids=["CPropAdam", "CPropSGD", "CProp"],
)
def test_nothing_is_compiled_twice(build):
    params = [torch.nn.Parameter(torch.randn(20, 30)), torch.nn.Parameter(torch.randn(30))]
    optimizer = build(params)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    train(optimizer, params, 2)
    before = compilations()
    for step in range(100):
        optimizer.param_groups[0]["cprop_c"] = 1.0 + step / 50
        optimizer.param_groups[0]["cprop_eps"] = 1e-8 * step
        train(optimizer, params, 1, start=step)
        scheduler.step()
    other = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7,), (3, 5, 2), (1,), (), (64, 64))]
    train(build(other), other, 5)
    assert compilations() == before


@pytest.mark.slow
@pytest.mark.parametrize("native", cases(NATIVES, pytest.mark.slow))
def test_rules_trace_whole(native):
    """No branch on a tensor's value, and no reading of one: the rule traces with ``fullgraph=True``."""
    params = [torch.nn.Parameter(torch.randn(4))]
    optimizer = native.cls(params, **native.settings, capturable=True)
    gradients(params, 0)
    ((job,),) = optimizer._jobs(params, optimizer.state, optimizer.param_groups[0], COLUMNS)
    tensors = dict(zip(job.names, *job.rows, strict=True))
    rule, flags = type(optimizer).rule, optimizer._flags(optimizer.param_groups[0])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, h: rule(x, h, flags), fullgraph=True, backend="eager")
    with torch.no_grad():
        traced, direct = compiled(tensors, job.scalars), rule(tensors, job.scalars, flags)
    for name, value in direct.items():
        torch.testing.assert_close(traced[name], value)


def test_capturable_keeps_counters_with_the_parameter_and_agrees():
    ours, theirs = inputs(), inputs()
    optimizer = cprop.CPropAdam(ours, lr=torch.tensor(0.01), capturable=True)
    train(optimizer, ours, 100)
    train(cprop.CPropAdam(theirs, lr=0.01), theirs, 100)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


class Operations(TorchDispatchMode):
    """Counts what reaches torch, but for views and the reading of counters."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not any(word in name for word in ("view", "as_strided", "promote_types", "scalar_dense", "profiler")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_foreach_works_on_all_parameters_at_once_but_not_if_their_counters_cannot_be_read():
    """As the documentation has it: about two dozen operations, and two a parameter; with capturable, dozens of each."""

    def operations(**settings):
        params = [torch.nn.Parameter(torch.ones(10)) for _ in range(48)]
        optimizer = cprop.CPropAdam(params, lr=0.01, foreach=True, **settings)
        train(optimizer, params, 1)
        gradients(params, 1)
        with Operations() as counted:
            optimizer.step()
        return counted.names

    batched = operations()
    assert sum("_foreach_" in name for name in batched) < 30
    assert sum("_foreach_" not in name for name in batched) == 2 * 48
    assert len(operations(capturable=True)) > 24 * 48


@pytest.mark.parametrize("build", [cprop.CPropSGD, cprop.CPropAdam])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_slices_of_a_tensor_are_the_whole(build, state_dtype, monkeypatch):
    ours, theirs = inputs(), inputs()
    train(build(theirs, lr=0.01, cprop_state_dtype=state_dtype), theirs, 20)
    monkeypatch.setattr(for_loop, "SLICE", 5)
    train(build(ours, lr=0.01, cprop_state_dtype=state_dtype), ours, 20)
    assert all(map(torch.equal, ours, theirs))


def test_foreach_on_a_cpu_is_the_for_loop(monkeypatch):
    monkeypatch.undo()
    assert {"cpu"} == foreach.LOOPED
    ours, theirs = inputs(), inputs()
    optimizer = cprop.CPropAdam(ours, lr=0.01, foreach=True)
    with Operations() as counted:
        train(optimizer, ours, 20)
    train(cprop.CPropAdam(theirs, lr=0.01), theirs, 20)
    assert all(map(torch.equal, ours, theirs))
    assert not any("_foreach_" in name for name in counted.names if "_foreach_add_" not in name)  # the counters


@pytest.mark.slow
def test_the_log_says_that_fused_is_faster_once_and_when_a_kernel_is_compiled(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_kernels", {})
    choice.recommend_fused.cache_clear()
    params = inputs()
    with caplog.at_level("INFO", logger="cprop"):
        train(cprop.CPropSGD(params), params, 2)
        train(cprop.CPropSGD(params), params, 2)
        train(cprop.CPropSGD(params[:1], fused=True), params[:1], 2)
    assert [record.getMessage() for record in caplog.records] == [
        "running a CPU step as a for-loop; with fused=True it is several times faster, compiled once",
        "compiling sgd for cpu, which takes some seconds once per machine",
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lr", [0.01, [0.01], [[0.01]]], ids=["no dimension", "one", "two"])
def test_tensor_learning_rate(lr, way):
    ours, theirs = inputs(), inputs()
    train(cprop.CPropAdam(ours, lr=torch.tensor(lr), **WAYS[way]), ours, 50)
    train(cprop.CPropAdam(theirs, lr=0.01), theirs, 50)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("cls", NATIVE_CLASSES)
def test_a_tensor_learning_rate_may_have_a_dimension_and_a_scheduler(cls, capturable):
    """A scheduler writes into a tensor in place: nothing may hold on to it as the rate of before."""
    try:
        torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(inputs(), lr=torch.tensor([0.01])), 0.8)
    except RuntimeError as error:
        pytest.skip(f"torch's own scheduler does not take a learning rate with a dimension: {error}")
    ours, theirs = inputs(), inputs()
    for lr, params in ((torch.tensor([0.01]), ours), (0.01, theirs)):
        optimizer = cls(params, lr=lr, capturable=capturable)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for step in range(10):
            gradients(params, step)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] is lr or isinstance(lr, float)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_torch_that_cannot_compile_kernels_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.delattr(torch._inductor, "standalone_compile", raising=False)
    params = inputs()
    gradients(params, 0)
    before = [p.detach().clone() for p in params]
    named = rf"torch {re.escape(torch.__version__)} does not have: install torch 2.8 or later, or set fused=False"
    with pytest.raises(RuntimeError, match=named):
        cprop.CPropSGD(params, fused=True).step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize(
    ("build", "prefix"),
    [(cprop.CPropSGD, ""), (cprop.CPropAdam, ""), (cprop.CProp.around(torch.optim.SGD), "cprop_")],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_foreach_and_fused_exclude_each_other_before_the_first_step(build, prefix):
    params = inputs()
    foreach, fused = {f"{prefix}foreach": True}, {f"{prefix}fused": True}
    refused = r"foreach=True and fused=True are mutually exclusive: set only one"
    with pytest.raises(RuntimeError, match=refused):
        build(params, lr=0.1, **foreach, **fused)
    with pytest.raises(RuntimeError, match=refused):
        build([{"params": params, **foreach}], lr=0.1, **fused)
    optimizer = build(params[:1], lr=0.1, **fused)
    with pytest.raises(RuntimeError, match=refused):
        optimizer.add_param_group({"params": params[1:], **foreach})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(foreach)
    with pytest.raises(cprop.CheckpointError, match=refused):
        optimizer.load_state_dict(saved)


def test_the_wrapper_refuses_the_two_flags_of_its_inner_optimizers_groups():
    inner = torch.optim.SGD([{"params": inputs(), "foreach": True, "fused": True}], lr=0.1)
    with pytest.raises(RuntimeError, match=r"foreach=True and fused=True are mutually exclusive"):
        cprop.CProp(inner)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    "build",
    [cprop.CPropAdam, cprop.CPropSGD, cprop.CProp.around(torch.optim.Adam)],
    ids=lambda cls: cls.__name__,
)
def test_a_step_of_fake_tensors(build, settings):
    """Tools that estimate memory run a step so. Nothing is compiled, whatever the settings."""
    with FakeTensorMode():
        w = torch.nn.Parameter(torch.randn(5))
        optimizer = build([w], lr=0.1, **settings)
        for _ in range(3):
            w.grad = torch.randn(5)
            optimizer.step()
        assert optimizer.state[w]["cprop_step"].item() == 3
        assert optimizer.state[w]["cprop_m"].shape == (5,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [i for i in INNERS if i.cls in (torch.optim.SGD, torch.optim.Adam)], ids=lambda i: i.id
)
def test_wrapper_goes_the_way_of_its_inner_optimizer(inner, monkeypatch):
    ways = []

    def prepare(rule, jobs, flags, way):
        ways.append(way)
        return choice.prepare(rule, jobs, flags, way)

    monkeypatch.setattr("cprop.optimizers.wrapper.prepare", prepare)
    for flags, way in (
        (({"fused": True}), choice.Implementation.FUSED),
        ({"foreach": True}, choice.Implementation.FOREACH),
    ):
        params = inputs()
        train(cprop.CProp(inner.cls(params, **inner.settings, **flags)), params, 1)
        assert set(ways) == {way}
        ways.clear()


def test_tensor_list_falls_back_to_one_tensor_at_a_time():
    x = TensorList([torch.tensor([1.0, -2.0]), torch.tensor([3.0])])
    positive = x.__torch_function__(torch.gt, (), (x, 0.0))
    assert [t.tolist() for t in torch.where(positive, x, 0.0).tensors] == [[1.0, 0.0], [3.0]]
    assert [t.tolist() for t in (1 - x).tensors] == [[0.0, 3.0], [-2.0]]
    assert [t.tolist() for t in (1 / x).tensors] == [[1.0, -0.5], [pytest.approx(1 / 3)]]
    assert [t.tolist() for t in (torch.tensor(2.0) * x).tensors] == [[2.0, -4.0], [6.0]]


def only_if_sure(moments):
    return (moments.z > 2.0).float()


def with_a_floor(moments):
    s = 2 * torch.special.ndtr(moments.z) - 1
    s[moments.z < 0.5] = 0.1
    return s


MEASURES_OF_USERS = [
    only_if_sure,
    with_a_floor,
    lambda m: 1 - 1 / (1 + m.z**2),
    lambda m: 1 - torch.exp(-m.z),
    lambda m: 1 - 0.5**m.z,
    lambda m: m.z.tanh(),
    lambda m: (m.m_hat.abs() / (m.v_hat.sqrt() + 1e-8)).clamp(max=1.0),
    lambda m: m.z.mul(0.5).clamp_(0.0, 1.0),
    lambda m: torch.stack([m.z / 4, torch.ones_like(m.z)]).min(0).values,
    lambda m: torch.nn.functional.softsign(np.float64(2) * m.z),
    lambda m: torch.tensor(0.5),
]


@pytest.mark.parametrize("measure", MEASURES_OF_USERS)
@pytest.mark.parametrize("build", [cprop.CPropSGD, cprop.CProp.around(torch.optim.SGD)], ids=["native", "wrapper"])
def test_foreach_takes_any_measure(build, measure):
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((), (5,), (4, 3))] for _ in range(2))
    foreach = build(ours, lr=0.1, cprop_measure=measure, foreach=True)
    plain = build(theirs, lr=0.1, cprop_measure=measure, foreach=False)
    for step in range(10):
        for optimizer, params in ((foreach, ours), (plain, theirs)):
            gradients(params, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [wrapper.observe_gradient, wrapper.rescale_update], ids=lambda rule: rule.__name__)
def test_the_wrappers_rules_trace_whole(rule):
    tensors = {name: torch.rand(4) + 0.1 for name in ("grad", "moved", "snapshot", "cprop_m", "cprop_v")}
    group = {"cprop_beta": 0.999, "cprop_c": torch.tensor(1.0), "cprop_eps": 1e-8}
    h, flags = statistics_scalars(group, torch.tensor(7.0)), wrapper.WrapperFlags("normal")
    torch._dynamo.reset()
    traced = torch.compile(lambda x, h: rule(x, h, flags), fullgraph=True, backend="eager")(tensors, h)
    for name, value in rule(tensors, h, flags).items():
        torch.testing.assert_close(traced[name], value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda ps: cprop.CPropAdam(ps, lr=torch.tensor(0.01), capturable=True),
        lambda ps: cprop.CPropSGD(ps, lr=torch.tensor(0.01), momentum=0.9, capturable=True),
    ],
    ids=["CPropAdam", "CPropSGD"],
)
def test_the_user_may_compile_the_whole_step(build):
    ours, theirs = inputs()[1:3], inputs()[1:3]
    optimizer, plain = build(ours), build(theirs)
    torch._dynamo.reset()
    compiled_step = torch.compile(optimizer.step)
    for step in range(10):
        gradients(ours, step)
        compiled_step()
    train(plain, theirs, 10)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_autograd_sees_that_a_parameter_was_written_to(way):
    w = torch.nn.Parameter(torch.randn(8))
    optimizer = cprop.CPropAdam([w], lr=0.01, **WAYS[way])
    loss = (w * w).sum()
    w.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def two_threads(monkeypatch):
    """For which kernels are compiled here; other tests have one."""
    monkeypatch.setattr(kernels, "_kernels", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("length", [kernels.LONG - 1, kernels.LONG, 3 * kernels.LONG + 5])
def test_short_and_long_kernels_agree(length, two_threads):
    """A short one runs on one thread, a long one on all; both write the odd elements at the end."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, length)) for _ in range(2)]
    fused = cprop.CPropAdam(params[:1], lr=0.01, fused=True)
    plain = cprop.CPropAdam(params[1:], lr=0.01, cprop_measure=IN_KERNELS)
    for step in range(3):
        gradient = torch.randn(length, generator=torch.Generator().manual_seed(step))
        for p, optimizer in zip(params, (fused, plain), strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(*params, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_kernel_does_not_run_past_the_end_of_a_parameters_state():
    """It does not look at shapes: whoever calls it must."""
    w = torch.nn.Parameter(torch.ones(8))
    optimizer = cprop.CPropSGD([w], lr=0.01, fused=True)
    train(optimizer, [w], 1)
    w.data = torch.ones(1 << 16)
    gradients([w], 1)
    with pytest.raises(
        RuntimeError, match=r"differ in shape \(param \(65536,\), grad \(65536,\), cprop_m \(8,\), .* new optimizer"
    ):
        optimizer.step()


@every_build_in_every_way
def test_data_that_was_transposed_is_refused(build, way):
    w = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = build([w], lr=0.01, **WAYS[way])
    train(optimizer, [w], 1)
    w.data = w.data.t().contiguous()
    gradients([w], 1)
    with pytest.raises(RuntimeError, match=r"differ in shape \(.*\(5, 3\).*cprop_m \(3, 5\).*build a new optimizer"):
        optimizer.step()


DEFAULT_DEVICE = """
import sys
import torch
import torch._dynamo  # torch 2.6 cannot import it with such a default device, and needs it for any optimizer
if sys.argv[1] == "before":
    torch.set_default_device("meta")
import cprop
torch.set_default_device("meta")

def train(build, **settings):
    w = torch.nn.Parameter(torch.ones(64, 64, device="cpu"))
    optimizer = build([w], **settings)
    monitor = cprop.Monitor(optimizer, every=2)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert 0.9 < monitor.samples[0].total.mean_scale <= 1, (build, settings)
    assert (w < 1).all(), (build, settings)
    optimizer.load_state_dict(optimizer.state_dict())

natives = [cprop.CPropSGD, cprop.CPropAdam, cprop.CPropAdamW, cprop.CPropRMSprop, cprop.CPropAdaBound]
for build in (*natives, cprop.CProp.around(torch.optim.SGD)):  # 2.6 has its own Adam's counter on the default device
    for measure in cprop.MEASURES if build is cprop.CPropAdam else ["normal"]:
        train(build, cprop_measure=measure)
    train(build, foreach=True)
    if build in natives:
        train(build, capturable=True)
    train(build, cprop_state_dtype="bfloat16")
    train(build, lr=torch.tensor(0.01, device="cpu"))
train(natives[0], fused=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_default_device_need_not_be_the_parameters(when):
    """Set before the import or after it: on the device "meta" a number is lost, and on any other in the wrong place."""
    code = [sys.executable, "-c", DEFAULT_DEVICE, when]
    result = subprocess.run(code, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr


FIRST_STEP = """
import resource, sys
import torch
torch.compile(lambda x: x + 1)(torch.ones(1 << 16))  # torch tries out the C++ compiler once a machine
import cprop
sys.path.insert(0, sys.argv[1])
from benchmarks.shapes import SHAPES
params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES["resnet-like"]()]
for p in params:
    p.grad = torch.ones_like(p)
optimizer = cprop.CPropAdam(params, fused=True)
def seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
start = seconds()
optimizer.step()
print(seconds() - start)
"""


@pytest.mark.slow
def test_the_first_step_of_a_long_list_compiles_within_15_seconds(tmp_path):
    """From an empty cache, for all 168 tensors: two kernels, one for the long ones and one for the short.

    Counted in the processor's seconds, the compiler's included: other tests run beside this one.
    """
    result = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, str(Path(__file__).parents[1])],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 15


EIGHT = """
import time
import torch
import cprop
p = torch.nn.Parameter(torch.zeros(1 << 16))
p.grad = torch.ones_like(p)
optimizer = cprop.CPropAdam([p], fused=True)
start = time.process_time()
optimizer.step()
print(time.process_time() - start)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_eight_processes_at_once_compile_and_then_reuse_the_kernels_on_disk(tmp_path):
    """The ranks of a machine start together: none may read what another has half written."""
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start_all():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen([sys.executable, "-c", EIGHT], env=own, **pipes) for _ in range(8)]
        results = [rank.communicate(timeout=500) for rank in ranks]
        assert not any(rank.returncode for rank in ranks), results
        return [float(out) for out, _ in results]

    start_all()
    libraries = set(tmp_path.rglob("*.so"))
    assert libraries
    again = start_all()
    assert set(tmp_path.rglob("*.so")) == libraries
    assert max(again) < 10


def from_nothing(cache):
    """The environment of a process with an empty cache; torch does not try out there which vectors the machine has."""
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1"}


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
    environment = from_nothing(tmp_path)
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


# --- the user's own compiler ----------------------------------------------------------------------


def generated(how, cache):
    script = Path(__file__).with_name("compile_beside.py")
    own = {**from_nothing(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = subprocess.run([sys.executable, script, how], env=own, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_users_own_torch_compile_gives_the_same_code_beside_kernels_and_after_them(tmp_path):
    """In the same thread, in another one that compiles at the same time, and from the cache in a later process."""
    alone = generated("generate", tmp_path / "alone")
    assert alone.count("cpp_fused") == 4  # each function's kernel, where it is defined and where it is called
    assert generated("fused", tmp_path / "beside") == alone
    assert generated("plain", tmp_path / "beside") == alone


def steps_with_kernels(monkeypatch):
    """Three steps, from kernels that are compiled now; the disk has them if nothing about them differs."""
    monkeypatch.setattr(kernels, "_kernels", {})
    params = inputs()
    optimizer = cprop.CPropAdam(params, lr=0.01, fused=True)
    train(optimizer, params, 3)
    return [*params, *(optimizer.state[p]["cprop_m"] for p in params)]


SETTINGS = [
    {"cpp_wrapper": True},
    {"cpp.simdlen": 0},
    {"cpp.simdlen": 256},
    {"cpp.enable_loop_tail_vec": False, "cpp.enable_tiling_heuristics": False},
    {"max_autotune": True, "coordinate_descent_tuning": True},
    {"graph_partition": False, "freezing": True},
    {"cpp.enable_floating_point_contract_flag": "off"},
    {"cpp.enable_unsafe_math_opt_flag": True, "use_fast_math": True},
    {"cpp.threads": 2, "cpp.dynamic_threads": True},
    {"emulate_precision_casts": True, "fallback_random": True},
    {"comprehensive_padding": False, "realize_opcount_threshold": 1, "inplace_buffers": False},
    {"post_grad_custom_post_pass": lambda graph: graph.erase_node(next(iter(graph.nodes)))},
]
AT_ONCE = {name: value for settings in SETTINGS for name, value in settings.items()}
CONTEXTS = [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.autograd.detect_anomaly]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(AT_ONCE, id="at-once"),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in [*SETTINGS, {"force_disable_caches": True}]),
    ],
)
def test_kernels_are_the_same_under_any_setting_of_the_users(settings, monkeypatch):
    from torch._inductor import config

    expected = steps_with_kernels(monkeypatch)
    with config.patch({name: value for name, value in settings.items() if name in config._config}):
        assert all(map(torch.equal, steps_with_kernels(monkeypatch), expected))


@pytest.mark.slow
def test_kernels_are_the_same_in_any_context(monkeypatch):
    expected = steps_with_kernels(monkeypatch)
    for context in CONTEXTS:
        with warnings.catch_warnings(action="ignore"), context():
            assert all(map(torch.equal, steps_with_kernels(monkeypatch), expected)), context


WITH_VARIABLES = """
import torch, cprop
p = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
p.grad = torch.linspace(1, -2, 1000)
optimizer = cprop.CPropAdam([p], lr=0.01, fused=True)
optimizer.step()
optimizer.step()
print(p.tolist())
"""


@pytest.mark.slow
def test_kernels_are_the_same_under_any_environment_variable_of_inductors(tmp_path, capsys):
    names = ("CPP_WRAPPER", "FREEZING", "CPP_DYNAMIC_THREADS", "CPP_ENABLE_UNSAFE_MATH_OPT_FLAG", "MAX_AUTOTUNE")
    own = {**os.environ, **{f"TORCHINDUCTOR_{name}": "1" for name in names}, "TORCH_COMPILE_DEBUG": "1"}
    pipes = {"capture_output": True, "text": True, "timeout": 500}
    result = subprocess.run([sys.executable, "-c", WITH_VARIABLES], env=own, cwd=tmp_path, check=True, **pipes)
    exec(WITH_VARIABLES, {})  # here, without them
    assert result.stdout == capsys.readouterr().out


def test_a_kernel_that_does_nothing_is_an_error_and_no_step(monkeypatch):
    """Whatever setting it is compiled under: before this, counters went up and the weights stayed."""
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: lambda *_: None)
    params = inputs()
    gradients(params, 0)
    before = [p.detach().clone() for p in params]
    optimizer = cprop.CPropSGD(params, fused=True)
    with pytest.raises(RuntimeError, match=r"kernel for sgd that does not compute it \(\d+% .* or set fused=False"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert all(state["cprop_step"] == 0 for state in optimizer.state.values())


def test_kernels_have_as_many_threads_as_torch_now(monkeypatch):
    chosen = []

    def traced(run, example, threads):
        chosen.append(threads)
        return lambda length, *tensors: run(length, *tensors)

    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "traced", traced)
    params = [torch.nn.Parameter(torch.ones(length)) for length in (kernels.LONG, 8)]
    optimizer = cprop.CPropSGD(params, fused=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            train(optimizer, params, 1)
    finally:
        torch.set_num_threads(before)
    assert chosen == [1, 2, 3]


# --- measures that are edited ---------------------------------------------------------------------


class Sloped:
    slope = 1.0

    def __call__(self, moments):
        return (self.slope * moments.z).clamp(max=1)


@pytest.mark.slow
def test_kernels_follow_a_measure_that_is_edited():
    measure = Sloped()
    p = torch.nn.Parameter(torch.zeros(200))
    optimizer = cprop.CPropSGD([p], lr=0.1, cprop_measure=measure, fused=True)
    train(optimizer, [p], 3)
    measure.slope = 0.0
    before = p.detach().clone()
    train(optimizer, [p], 3, start=3)
    assert torch.equal(p, before)
    measure.slope = 1.0
    train(optimizer, [p], 1, start=6)
    assert not torch.equal(p, before)


def test_a_measure_that_reads_what_cannot_be_compared_is_refused_in_kernels():
    numbers = (x / 10 for x in range(10))
    p = torch.nn.Parameter(torch.zeros(200))
    optimizer = cprop.CPropSGD([p], cprop_measure=lambda m: m.z * next(numbers), fused=True)
    p.grad = torch.ones(200)
    with pytest.raises(RuntimeError, match="reads an object of type generator, and fused=True cannot see whether"):
        optimizer.step()


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


# --- nothing is read from the device --------------------------------------------------------------


@pytest.mark.parametrize("measure", [m for m in cprop.MEASURES if m != "relative_rate"])  # copies its first state
@pytest.mark.parametrize("cls", [torch.optim.Adam, *NATIVE_CLASSES])
def test_capturable_with_foreach_reads_nothing_from_the_device(cls, measure):
    """A fake tensor on a GPU has no value to read. (On a build without CUDA it cannot be copied to either.)"""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((5,), (2, 3), ())]
        own = {} if cls is torch.optim.Adam else {"cprop_measure": measure}
        optimizer = cls(params, foreach=True, capturable=True, **own)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("cls", NATIVE_CLASSES)
def test_capturable_reads_nothing_of_what_has_no_values(cls, foreach, state_dtype):
    """On the device "meta", reading is an error, and copying is not."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in ((5,), (2, 3), ())]
    optimizer = cls(params, foreach=foreach, capturable=True, cprop_state_dtype=state_dtype)
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
