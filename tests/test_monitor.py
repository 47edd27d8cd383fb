"""What the monitor says is what the statistics hold, on one rank and on several, and it says it when it should."""

import logging
import math
import re
from itertools import pairwise

import pytest
import table
import torch
import torch.distributed as dist
from processes import needs_fsdp2, spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import cprop
from cprop.diagnostics.advice import PATIENCE, SURE, advice
from cprop.diagnostics.summary import BINS, Layer, Sample, at_least, get_kernel, summed, summed_and_shown
from cprop.execution.kernels import measure_in_kernels


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 7, generator=generator), torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "native": lambda params, **settings: cprop.CPropAdam(params, lr=1e-2, **settings),
    "native, fused": lambda params, **settings: cprop.CPropAdam(params, lr=1e-2, fused=True, **settings),
    "wrapper": lambda params: cprop.CProp(torch.optim.RMSprop(params, lr=1e-2)),
    "relative rate": lambda params: cprop.CPropSGD(params, lr=1e-2, cprop_measure="relative_rate"),
    "bfloat16": lambda params: cprop.CPropSGD(params, lr=1e-2, cprop_state_dtype="bfloat16"),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_says_what_the_scales_are(make):
    model = network()
    optimizer = make(model.parameters())
    monitor = cprop.Monitor(optimizer, model.named_parameters(), every=10)
    train(model, optimizer, 25)
    assert [sample.step for sample in monitor.samples] == [10, 20]
    last = monitor.sample()
    scales = torch.cat([scale.flatten() for _, scale in optimizer.scales()])
    assert last.total.mean_scale == pytest.approx(
        scales.mean().item(), rel=1e-4 if optimizer.defaults.get("fused") else 1e-5
    )
    assert last.total.elements == scales.numel()
    expected = torch.histc(scales, BINS, 0, 1) / scales.numel()
    assert sum(map(abs, (torch.tensor(last.total.histogram) - expected).tolist())) < 0.02
    assert list(last.layers) == ["0", "2"]
    assert last.layers["2"].elements == 13 * 5 + 5
    weights = [layer.elements * layer.mean_scale for layer in last.layers.values()]
    assert sum(weights) / last.total.elements == pytest.approx(last.total.mean_scale)


@pytest.mark.slow
@pytest.mark.parametrize("function", [summed, at_least, summed_and_shown])
def test_a_kernel_gives_what_its_function_gives(function):
    numbers = torch.tensor([1.0, *cprop.moments.Corrections.of(300.0, 1e-8, 0.3, 0.3)])
    compiled = get_kernel(function, "normal", 2, False, torch.float32, torch.device("cpu"))
    for length in (1000, 17, 1):  # one kernel for all
        m, v = torch.randn(length) * 1e-3, torch.rand(length) * 1e-4 + 1e-5
        (found,) = compiled(length, m, v, numbers)
        measure = measure_in_kernels("normal", m.device, m.dtype)
        torch.testing.assert_close(found, function((m, v), numbers, measure), rtol=1e-5, atol=1e-9)


WAYS = {
    "native": (lambda p: cprop.CPropSGD([p], lr=0.1), False),
    "native, fused": (lambda p: cprop.CPropSGD([p], lr=0.1, fused=True), True),
    "as the inner optimizer": (lambda p: cprop.CProp(torch.optim.SGD([p], lr=0.1, fused=True)), True),
    "told not to": (lambda p: cprop.CProp(torch.optim.SGD([p], lr=0.1, fused=True), fused=False), False),
    "told another": (lambda p: cprop.CProp(torch.optim.SGD([p], lr=0.1, fused=True), foreach=True), False),
    "told to": (lambda p: cprop.CProp(torch.optim.SGD([p], lr=0.1), fused=True), True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "compiles"), WAYS.values(), ids=WAYS)
def test_a_sample_is_compiled_where_the_step_is(make, compiles, monkeypatch):
    asked = []
    monkeypatch.setattr("cprop.diagnostics.summary.get_kernel", lambda *kind: asked.append(kind) or get_kernel(*kind))
    p = nn.Parameter(torch.zeros(3))
    optimizer = make(p)
    p.grad = torch.ones(3)
    optimizer.step()
    cprop.Monitor(optimizer).sample()
    assert bool(asked) == compiles


def test_a_parameter_longer_than_a_block_and_a_histogram(monkeypatch):
    monkeypatch.setattr("cprop.diagnostics.summary.BLOCK", 64)
    monkeypatch.setattr("cprop.diagnostics.summary.SHOWN", 32)
    p = nn.Parameter(torch.zeros(1000))
    optimizer = cprop.CPropSGD([p], lr=0.1)
    for _ in range(5):
        p.grad = torch.arange(1000.0) - 500 + torch.randn(1000)
        optimizer.step()
    seen = cprop.Monitor(optimizer).sample().total
    ((_, scale),) = optimizer.scales()
    assert seen.mean_scale == pytest.approx(scale.mean().item(), rel=1e-5)
    assert sum(seen.histogram) == pytest.approx(1.0)
    assert seen.histogram[-1] == pytest.approx((scale >= 1 - 1 / BINS).float().mean().item(), abs=0.05)


class Regression:
    """Linear regression, whose per-example gradients at any weights, and so signal and noise, are known."""

    def __init__(self, examples=4096, size=20):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(examples, size, generator=generator)
        targets = self.inputs @ torch.linspace(-1, 1, size) + torch.randn(examples, generator=generator)
        self.model = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        gradients = -2 * targets[:, None] * self.inputs  # of (x w - t)^2 at w = 0
        self.targets = targets
        self.signal = gradients.mean(0).square().sum().item()
        self.noise = gradients.var(0, unbiased=False).sum().item()

    def batch(self, size, step):
        chosen = torch.randint(len(self.inputs), (size,), generator=torch.Generator().manual_seed(step))
        return (self.model(self.inputs[chosen]).squeeze(1) - self.targets[chosen]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "steps", "batch_size"), [(0.999, 2000, 16), (0.99, 400, 64), (0.9999, 300, 16)])
def test_the_noise_scale_of_a_known_problem(beta, steps, batch_size):
    """Within 20 %, at weights that stand still, also long before the horizon is full."""
    problem = Regression()
    optimizer = cprop.CPropSGD(problem.model.parameters(), lr=0.0, cprop_beta=beta)
    monitor = cprop.Monitor(optimizer, every=steps, batch_size=batch_size)
    for step in range(steps):
        optimizer.zero_grad()
        problem.batch(batch_size, step).backward()
        optimizer.step()
    (sample,) = monitor.samples
    assert sample.total.noise == pytest.approx(problem.noise / batch_size, rel=0.1)
    assert sample.total.signal == pytest.approx(problem.signal, rel=0.15)
    assert sample.total.noise_scale(batch_size) == pytest.approx(problem.noise / problem.signal, rel=0.2)
    assert abs(sample.total.signal - problem.signal) < 4 * sample.total.signal_error


def test_noise_alone_has_no_signal():
    """What is left of the squared mean without the correction would be taken for signal."""
    p = nn.Parameter(torch.zeros(10_000))
    optimizer = cprop.CPropSGD([p], lr=0.0, cprop_beta=0.99)
    monitor = cprop.Monitor(optimizer, batch_size=32)
    for step in range(300):
        p.grad = torch.randn(10_000, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    total = monitor.sample().total
    assert abs(total.signal) < 4 * total.signal_error
    assert total.noise == pytest.approx(10_000, rel=0.05)
    assert any(
        re.match(r"the mean gradient cannot be distinguished from noise: the noise", x) for x in monitor.advice()
    )


@pytest.mark.parametrize("eps", [1e-8, None], ids=["the paper's", "the default"])
def test_eps_that_dominates_is_told(eps):
    model = network()
    optimizer = cprop.CPropSGD(model.parameters(), lr=0.1, **({} if eps is None else {"cprop_eps": eps}))
    monitor = cprop.Monitor(optimizer, model.named_parameters())
    for step in range(20):
        for p in model.parameters():
            size = 1e-11 if p is model[0].weight else 1e-3
            p.grad = size * (1 + torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
        optimizer.step()
    layers = monitor.sample().layers
    if eps is None:
        assert layers["0"].eps_dominates == 0.0
        assert monitor.advice() == []
        return
    assert layers["0"].eps_dominates == pytest.approx(7 / 8)  # the weights, and not the biases
    assert layers["2"].eps_dominates == 0.0
    assert monitor.advice() == [
        "eps dominates in 88 % of 0: lower cprop_eps (down to 0), or CProp slows down learning there"
    ]


def test_constant_gradients_are_not_held_back_by_eps():
    p = nn.Parameter(torch.zeros(3))
    optimizer = cprop.CPropSGD([p], lr=0.1, cprop_eps=1e-8)
    for _ in range(10):
        p.grad = torch.full((3,), 1e-3)
        optimizer.step()
    assert cprop.Monitor(optimizer).sample().total.eps_dominates == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_without_scaling_all_scales_are_one_also_where_there_is_no_gradient(fused):
    p = nn.Parameter(torch.zeros(4))
    optimizer = cprop.CPropSGD([p], lr=0.1, cprop_c=math.inf, fused=fused)
    monitor = cprop.Monitor(optimizer, every=3)
    for gradient in (torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, 1.0])):
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step()
    silent, half = (sample.total for sample in monitor.samples)
    assert (silent.elements, silent.mean_scale, silent.silent) == (4, 1.0, 1.0)
    assert (half.elements, half.mean_scale, half.silent) == (4, 1.0, 0.5)


def some_layer(**changes):
    values = {"mean_scale": 0.5, "eps_dominates": 0.0, "silent": 0.0, "signal": 1.0, "noise": 1.0, "signal_error": 0.0}
    return Layer(elements=10, histogram=(1 / BINS,) * BINS, **{**values, **changes})


def said(first, last, **changes):
    layer = some_layer(**changes)
    batch_size = changes.pop("batch_size", None)
    return list(advice([Sample(step, layer, {"fc": layer}, batch_size) for step in range(first, last + 1, 100)]))


RATE = r"mean conformity above 0\.9 for 2,000 steps: the learning rate is probably too small"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conformity": 0.95}, RATE),
        ({"silent": 1.0}, r"fc has had only zero gradients in 2,100 steps: it does not learn"),
    ],
)
def test_advice_on_what_lasts(changes, words):
    (line,) = said(100, PATIENCE + 100, **changes)
    assert re.match(words, line)
    assert said(PATIENCE - 400, PATIENCE - 100, **changes) == []


def watched(*groups):
    """A monitor of 400 steps at weights that stand still, a parameter for each mean, deviation of gradients and c."""
    params = [nn.Parameter(torch.zeros(1000)) for _ in groups]
    settings = [{"params": [p], "cprop_c": c} for p, (*_, c) in zip(params, groups, strict=True)]
    optimizer = cprop.CPropSGD(settings, lr=0.0, cprop_beta=0.99)
    monitor = cprop.Monitor(optimizer, every=100)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        for p, (mean, deviation, _) in zip(params, groups, strict=True):
            p.grad = mean + deviation * torch.randn(1000, generator=generator)
        optimizer.step()
    return monitor


NOISE, SIGNAL = (0.0, 1.0), (1.0, 1.0)
RUNS = {
    "noise": ([(*NOISE, 1.0)], False),
    "noise, overconfident": ([(*NOISE, 8.0)], False),
    "noise, not scaled": ([(*NOISE, math.inf)], False),
    "signal": ([(*SIGNAL, 1.0)], True),
    "signal, overconfident": ([(*SIGNAL, 8.0)], True),
    "signal, held back": ([(*SIGNAL, 0.5)], True),
    "signal, not scaled": ([(*SIGNAL, math.inf)], False),
    "signal, and noise that is not scaled": ([(*SIGNAL, 1.0), (*NOISE, math.inf)], True),
    "noise, and signal that is not scaled": ([(*NOISE, 1.0), (*SIGNAL, math.inf)], False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "given"), RUNS.values(), ids=RUNS)
def test_a_larger_rate_is_advised_where_gradients_agree_whatever_c_makes_of_it(groups, given, monkeypatch):
    monkeypatch.setattr("cprop.diagnostics.advice.PATIENCE", 300)
    assert any("the learning rate is probably too small" in line for line in watched(*groups).advice()) == given


def test_the_conformity_is_the_mean_scale_without_overconfidence():
    sample = watched(*((*NOISE, c) for c in (1.0, 8.0, math.inf))).samples[-1]
    one, eight, none = sample.layers.values()
    assert one.conformity == one.mean_scale
    assert eight.conformity == pytest.approx(2 / math.pi * math.atan(math.sqrt(0.5)), abs=0.03)
    assert eight.mean_scale > SURE
    assert math.isnan(none.conformity)
    assert sample.total.conformity == pytest.approx((one.conformity + eight.conformity) / 2)


def test_one_gradient_agrees_with_itself_and_says_nothing():
    p = nn.Parameter(torch.zeros(100))
    optimizer = cprop.CPropSGD([p], lr=0.0, cprop_beta=0.0)
    for _ in range(3):
        p.grad = torch.randn(100)
        optimizer.step()
    assert math.isnan(cprop.Monitor(optimizer).sample().total.conformity)


@pytest.mark.parametrize(
    ("c", "size", "share"), [(1.0, 1e-9, 1.0), (8.0, 1e-9, 1.0), (8.0, 1e-8, 0.0), (math.inf, 1e-9, 0.0)]
)
def test_eps_holds_nothing_back_where_the_scale_is_one(c, size, share):
    """With c = 8 it is from a mean of 0.16 eps on."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = cprop.CPropSGD([p], lr=0.1, cprop_c=c, cprop_eps=1e-8)
    monitor = cprop.Monitor(optimizer)
    for _ in range(10):
        p.grad = torch.full((3,), size)
        optimizer.step()
    assert monitor.sample().total.eps_dominates == share
    assert any("eps dominates" in line for line in monitor.advice()) == bool(share)


def test_nothing_is_said_of_what_has_passed_or_is_well():
    sure, half = (some_layer(conformity=mean) for mean in (0.95, 0.5))
    history = [Sample(step, sure, {}) for step in range(0, 3000, 100)]
    assert list(advice([*history, Sample(3000, half, {})])) == []
    assert said(100, 5000) == []
    assert list(advice([])) == []


@pytest.mark.parametrize(
    ("noise", "words"),
    [(100.0, r"the gradient noise scale is about 3,200 examples, and the batch size is 32: larger batches"),
     (0.01, r"the gradient noise scale is about 0 examples, and the batch size is 32: smaller batches")],
)  # fmt: skip
def test_advice_on_batches(noise, words):
    layer = some_layer(noise=noise)
    (line,) = advice([Sample(100, layer, {}, batch_size=32)])
    assert re.match(words, line)
    assert list(advice([Sample(100, some_layer(noise=1.0), {}, batch_size=32)])) == []


def test_sinks_are_told_until_it_is_closed():
    model, told = network(), []
    optimizer = cprop.CPropSGD(model.parameters(), lr=0.1)
    monitor = cprop.Monitor(optimizer, model.named_parameters(), every=5, batch_size=8, sinks=[told.append])
    train(model, optimizer, 12)
    monitor.close()
    train(model, optimizer, 12, start=12)
    assert [sample.step for sample in told] == [5, 10]
    numbers = told[-1].scalars("run")
    assert numbers["run/2/mean_scale"] == told[-1].layers["2"].mean_scale
    assert numbers["run/noise_scale"] == told[-1].total.noise_scale(8)


def test_a_long_run_keeps_so_many_samples_the_recent_ones_all(monkeypatch):
    monkeypatch.setattr("cprop.diagnostics.monitor.KEPT", 20)
    p, told = nn.Parameter(torch.zeros(1)), []
    optimizer = cprop.CPropSGD([p], lr=0.1)
    monitor = cprop.Monitor(optimizer, every=2, sinks=[told.append])
    for _ in range(400):
        p.grad = torch.ones(1)
        optimizer.step()
    assert len(told) == 200
    steps = [sample.step for sample in monitor.samples]
    assert steps[-11:] == list(range(380, 401, 2))
    assert len(steps) == 20
    assert steps[0] == 2
    gaps = [later - earlier for earlier, later in pairwise(steps[:9])]
    assert max(gaps) <= 2 * min(gaps)  # what is left of the time before is spread over all of it


def test_after_one_gradient_there_is_no_noise_to_tell():
    model = network()
    optimizer = cprop.CPropSGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    monitor = cprop.Monitor(optimizer, batch_size=8)
    sample = monitor.sample()
    assert sample.total.mean_scale == pytest.approx(1.0)
    assert math.isnan(sample.total.noise)
    assert "cprop/noise_scale" not in sample.scalars()
    assert monitor.advice() == []


def test_a_parameter_without_elements_is_passed_over():
    empty, p = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.zeros(2))
    optimizer = cprop.CPropSGD([empty, p], lr=0.1)
    monitor = cprop.Monitor(optimizer, [("empty.weight", empty), ("fc.weight", p)], every=1)
    empty.grad = torch.empty(0, 3)
    optimizer.step()
    assert monitor.samples == []  # nothing but the empty one has had a gradient
    p.grad = torch.ones(2)
    optimizer.step()
    (sample,) = monitor.samples
    assert list(sample.layers) == ["fc"]
    assert sample.total.elements == 2


def test_statistics_without_memory_have_no_noise_to_tell():
    """With a beta of zero they are of one gradient at every step, and one gradient has no variance."""
    model = network()
    optimizer = cprop.CPropSGD(model.parameters(), lr=0.1, cprop_beta=0.0)
    monitor = cprop.Monitor(optimizer, every=1)
    train(model, optimizer, 3)
    assert [sample.total.mean_scale for sample in monitor.samples] == pytest.approx([1.0] * 3)
    assert all(math.isnan(sample.total.noise) for sample in monitor.samples)


def test_a_parameter_without_a_name_keeps_its_number():
    early, late, named = (nn.Parameter(torch.zeros(size)) for size in (1, 2, 3))
    optimizer = cprop.CPropSGD([{"params": [late]}, {"params": [named, early]}], lr=0.1)
    monitor = cprop.Monitor(optimizer, [("fc.weight", named)], every=1)
    for late.grad in (None, torch.ones(2)):
        named.grad, early.grad = torch.ones(3), torch.ones(1)
        optimizer.step()
    first, second = ({name: own.elements for name, own in sample.layers.items()} for sample in monitor.samples)
    assert first == {"fc": 3, "parameter 2": 1}
    assert second == {"parameter 0": 2, "fc": 3, "parameter 2": 1}


def test_a_sample_that_falls_due_before_the_first_gradient_is_left_out():
    p = nn.Parameter(torch.zeros(1))
    optimizer = cprop.CPropSGD([p], lr=0.1)
    monitor = cprop.Monitor(optimizer, every=2)
    for step in range(1, 7):
        p.grad = torch.ones(1) if step > 2 else None
        optimizer.step()
    assert [sample.step for sample in monitor.samples] == [2, 4]


def test_what_it_refuses():
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(
        TypeError, match=r"Adam has no CProp statistics to monitor: pass .* such as cprop.CProp\(optimizer\)"
    ):
        cprop.Monitor(torch.optim.Adam([p]))
    optimizer = cprop.CPropSGD([p], lr=0.1)
    with pytest.raises(ValueError, match="invalid every 0: it must be an integer of at least 1"):
        cprop.Monitor(optimizer, every=0)
    with pytest.raises(ValueError, match="invalid batch_size 0: it must be an integer of at least 1"):
        cprop.Monitor(optimizer, batch_size=0)
    with pytest.raises(ValueError, match="no parameter has had a gradient yet: take a step first"):
        cprop.Monitor(optimizer).sample()


def sharded(rank, world, folder):
    model = network()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    optimizer = cprop.CPropAdam(model.parameters(), lr=1e-2)
    monitor = cprop.Monitor(optimizer, model.named_parameters(), every=1000, batch_size=8)
    train(model, optimizer, 30)
    with CommDebugMode() as communication:
        sample = monitor.sample()
    collectives = communication.get_total_counts()
    if rank == 0:
        torch.save((sample.scalars(), sample.total.histogram, collectives), f"{folder}/sample.pt")
    dist.barrier()


@needs_fsdp2
@pytest.mark.slow
def test_on_sharded_parameters_it_sees_the_whole(tmp_path):
    """Every rank has the same batch, so the gradients are those of one process; one reduction in all."""
    spawn(sharded, 2, tmp_path)
    numbers, histogram, collectives = torch.load(tmp_path / "sample.pt")
    model = network()
    optimizer = cprop.CPropAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, 30)
    alone = cprop.Monitor(optimizer, model.named_parameters(), batch_size=8).sample()
    assert numbers == pytest.approx(alone.scalars(), rel=1e-4)
    assert histogram == pytest.approx(alone.total.histogram, abs=1e-6)
    assert collectives == 1


def test_nothing_is_said_of_batches_where_the_noise_has_all_but_gone():
    """Near a loss of zero the signal has gone too, and their ratio says nothing."""
    early, late = some_layer(noise=1000.0), some_layer(noise=9.0, signal=0.01)
    assert list(advice([Sample(100, early, {}, 32), Sample(200, late, {}, 32)])) == []
    assert len(list(advice([Sample(200, late, {}, 32)]))) == 1


@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.Adam)], ids=["native", "wrapper"])
def test_elements_that_are_not_finite_are_counted(build):
    w = nn.Parameter(torch.ones(4))
    optimizer = build([w], lr=0.01)
    monitor = cprop.Monitor(optimizer, every=2)
    for step in range(6):
        w.grad = torch.tensor([1.0, torch.nan, -torch.inf, 2.0]) if step in (2, 3) else torch.ones(4)
        optimizer.step()
    assert [sample.not_finite for sample in monitor.samples] == [0, 2, 0]
    assert monitor.samples[1].scalars()["cprop/not_finite"] == 2
    assert monitor.advice()[0].startswith(
        "1 of 3 samples had NaN or infinite gradient elements, at most 2, which count"
    )


def test_a_monitor_and_a_sample_are_shown_on_one_line():
    w = nn.Parameter(torch.ones(4))
    optimizer = cprop.CPropAdam([w], lr=0.01)
    monitor = cprop.Monitor(optimizer, every=1)
    assert repr(monitor) == "Monitor(CPropAdam, every=1, no samples yet)"
    w.grad = torch.ones(4)
    optimizer.step()
    assert (
        repr(monitor) == "Monitor(CPropAdam, every=1, last Sample(step=1, mean_scale=1, signal_to_noise=nan, layers=1))"
    )


def test_a_raising_logger_does_not_end_the_training(caplog):
    params = table.inputs()[1:2]
    optimizer = cprop.CPropAdam(params, lr=0.01)
    kept = []
    monitor = cprop.Monitor(optimizer, every=1, sinks=[lambda sample: 1 / 0, kept.append])
    with caplog.at_level(logging.WARNING, "cprop"):
        table.train(optimizer, params, 3)
    assert len(kept) == len(monitor.samples) == 3
    (record,) = caplog.records
    assert "a sink of cprop.Monitor failed; training continues" in record.getMessage()
    assert "ZeroDivisionError" in record.exc_text


@pytest.mark.slow
def test_the_monitor_sums_gradients_of_any_size():
    w = torch.nn.Parameter(torch.zeros(1000))
    for way in table.WAYS.values():
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
