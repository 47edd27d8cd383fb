"""Lean state and lean weights: bfloat16 holds what float32 holds, nearly."""

import copy
import io
import math

import pytest
import torch
from table import ROUNDED, TABLE, WAYS, every_way, gradients, inputs, train

import cprop
from cprop.execution import for_loop
from cprop.storage import Draw, random_bits, round_stochastically


def large(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((64, 128), (128,), (4096,))]


def bytes_per_parameter(optimizer, params):
    held = sum(
        x.numel() * x.element_size() for p in params for key, x in optimizer.state[p].items() if "step" not in key
    )
    return held / sum(p.numel() for p in params)


@pytest.mark.parametrize(("storage", "limit"), [("float32", 12.0), ("bfloat16", 6.0)])
def test_bytes_of_state(storage, limit):
    params = [torch.nn.Parameter(torch.randn(512, 1024))]
    optimizer = cprop.CPropAdam(params, cprop_state_dtype=storage)
    train(optimizer, params, 1)
    assert bytes_per_parameter(optimizer, params) <= limit
    assert bytes_per_parameter(optimizer, params) > 0.9 * limit


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CPropSGD], ids=lambda cls: cls.__name__)
def test_lean_state_goes_about_where_float32_goes(build, way):
    ours, theirs, still = large(), large(), large()
    train(build(ours, lr=0.01, cprop_state_dtype="bfloat16", **WAYS[way]), ours, 100)
    train(build(theirs, lr=0.01), theirs, 100)
    for a, b, start in zip(ours, theirs, still, strict=True):
        assert (a - b).norm() < 0.15 * (b - start).norm()


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_the_ways_agree_in_bfloat16(way):
    """The random bits are a hash of the number: a number that differs in its last digit is rounded another way."""
    ours, theirs, still = large(), large(), large()
    train(cprop.CPropAdam(ours, lr=0.01, cprop_state_dtype="bfloat16", **WAYS[way]), ours, 20)
    train(cprop.CPropAdam(theirs, lr=0.01, cprop_state_dtype="bfloat16"), theirs, 20)
    for a, b, start in zip(ours, theirs, still, strict=True):
        assert (a - b).norm() < 0.05 * (b - start).norm()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", [e for e in TABLE if e.id in ("CPropAdam", "CProp-Adamax")], ids=lambda e: e.id)
def test_lean_state_resumes_to_the_bit(entry, way):
    wrapper = entry.id.startswith("CProp-")
    flags = {f"cprop_{k}" if wrapper else k: v for k, v in WAYS[way].items()}
    params = large()
    optimizer = entry.build(params, cprop_state_dtype="bfloat16", **flags)
    train(optimizer, params, 10)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    resumed_params = copy.deepcopy(params)
    resumed = entry.build(resumed_params, cprop_state_dtype="bfloat16", **flags)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    train(optimizer, params, 10, start=10)
    train(resumed, resumed_params, 10, start=10)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))


@pytest.mark.parametrize(
    "build",
    [
        lambda ps: cprop.CPropAdam(ps, cprop_measure="relative_rate", cprop_state_dtype="bfloat16"),
        lambda ps: cprop.CProp(torch.optim.Adam(ps), measure="relative_rate", state_dtype="bfloat16"),
    ],
    ids=["native", "wrapper"],
)
def test_the_mean_absolute_gradient_is_kept_in_the_format_too(build):
    params = large()
    optimizer = build(params)
    train(optimizer, params, 10)
    assert optimizer.state[params[0]]["cprop_a"].dtype == torch.bfloat16
    resumed_params = copy.deepcopy(params)
    resumed = build(resumed_params)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, 10, start=10)
    train(resumed, resumed_params, 10, start=10)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))


FORMAT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("build", [cprop.CPropAdam, cprop.CProp.around(torch.optim.Adam)], ids=["native", "wrapper"])
@pytest.mark.parametrize("before", FORMAT_TYPES)
@pytest.mark.parametrize("after", FORMAT_TYPES)
def test_a_checkpoint_may_change_its_format(build, before, after):
    params = large()
    optimizer = build(params, lr=0.01, cprop_state_dtype=before)
    train(optimizer, params, 10)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["cprop_state_dtype"] = after
    fresh = copy.deepcopy(params)
    converted = build(fresh, lr=0.01)
    converted.load_state_dict(saved)
    assert converted.param_groups[0]["cprop_state_dtype"] == after
    assert converted.state[fresh[0]]["cprop_m"].dtype == FORMAT_TYPES[after]
    for (_, a), (_, b) in zip(optimizer.scales(), converted.scales(), strict=True):
        assert (a - b).abs().mean() < 0.05
    train(converted, fresh, 2, start=10)


@pytest.mark.slow
def test_bfloat16_state_follows_a_mean_that_nearest_rounding_would_lose():
    w = torch.nn.Parameter(torch.zeros(4096))
    optimizer = cprop.CPropSGD([w], lr=0.0, cprop_state_dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        w.grad = 1 + 0.1 * torch.randn(4096, generator=generator)
        optimizer.step()
    mean = optimizer.state[w]["cprop_m"].float().mean().item()
    assert mean == pytest.approx(1 - 0.999**1000, rel=5e-3)  # 0.63
    # Rounded to nearest, it stops where a thousandth of the distance is half a unit in the last place.
    nearest = torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(1000):
        nearest = (nearest.float() + 0.001 * (1 - nearest.float())).bfloat16()
    assert nearest < 0.3


FIRST_STEPS = [*WAYS.values(), {"cprop_measure": "student_t"}, {"cprop_measure": "logistic"}, {"cprop_beta": 0.0}]


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        *((cprop.CPropSGD, settings) for settings in (*FIRST_STEPS, {"capturable": True})),
        *((cprop.CProp.around(torch.optim.SGD), settings) for settings in FIRST_STEPS),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else x.__name__,
)
def test_lean_state_takes_every_element_in_full_at_first(build, settings):
    """One gradient has no variance: of a rounded mean and mean square there would be one, divided by epsilon alone."""
    g = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    g[0] = 0.0
    w = torch.nn.Parameter(torch.zeros_like(g))
    optimizer = build([w], lr=1.0, cprop_state_dtype="bfloat16", **settings)
    w.grad = g.clone()
    optimizer.step()
    ((_, scale),) = optimizer.scales()
    # Student's t with one degree of freedom has long tails, of which epsilon leaves up to 1e-3.
    torch.testing.assert_close(w.detach(), -g, atol=0, rtol=1e-3)
    torch.testing.assert_close(scale, (g != 0).float(), atol=1e-3, rtol=0)


def test_stochastic_rounding_is_unbiased_and_leaves_exact_numbers_alone():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=generator)

    def rounded(x, t):
        return round_stochastically(x, random_bits(x, Draw.of(t, 0))).float()

    mean = torch.stack([rounded(x, float(t)) for t in range(400)]).mean(0)
    unit = x.abs() * 2**-8
    assert ((mean - x) / unit).mean().abs() < 2e-3
    assert ((mean - x) / unit).abs().max() < 0.25
    exact = x.bfloat16().float()
    assert torch.equal(rounded(exact, 7.0), exact)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(special, 3.0), special)
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert all(rounded(nans, float(t)).isnan().all() for t in range(100))  # CUDA's own has all bits set


def test_what_lies_beyond_the_largest_bfloat16_may_become_infinite_as_when_rounded_to_nearest():
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1000,), 3.3e38)
    assert round_stochastically(x, random_bits(x, Draw.of(1.0, 0))).max() <= largest
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    assert set(round_stochastically(x, random_bits(x, Draw.of(1.0, 0))).tolist()) <= {largest, torch.inf}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("before", [1e3, 2.0**24, 2.0**40])
def test_weights_keep_moving_at_any_step(before, capturable):
    """A counter in float32 ends at 2**24: every later step would round each weight the same way."""
    p = torch.nn.Parameter(torch.linspace(1, 1.9, 2048).bfloat16())
    optimizer = cprop.CPropSGD([p], lr=1e-3, cprop_c=torch.inf, capturable=capturable, **ROUND)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["cprop_step"].fill_(before)
    start = p.detach().clone()
    for _ in range(20):
        optimizer.step()
    assert optimizer.state[p]["cprop_step"] == before + 20
    assert (start - p).float().mean().item() == pytest.approx(0.02, rel=0.1)


def test_an_earlier_checkpoint_with_counters_in_float32_counts_on_exactly():
    (p,) = params = [torch.nn.Parameter(torch.ones(8))]
    optimizer = cprop.CPropAdam(params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    assert saved["state"][0]["cprop_step"].dtype == torch.float64
    saved["state"][0]["cprop_step"] = torch.tensor(2.0**24)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 3)
    assert optimizer.state[p]["cprop_step"].item() == 2**24 + 3


@pytest.mark.parametrize("state_dtype", FORMAT_TYPES)
def test_equal_weights_are_rounded_independently(state_dtype):
    """As in the gains of a norm. Of 4,096 weights, the mean error is a 64th of one weight's, about 1e-4."""
    params = [torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = cprop.CPropAdamW(params, lr=1e-3, weight_decay=0.1, cprop_state_dtype=state_dtype, **ROUND)
    for _ in range(100):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p in params:
        assert (p.detach().float().mean() - (1 - 1e-4) ** 100).abs() < 1e-3
    first, second = (p.detach().float() for p in params)
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.1  # nor are equal parameters alike


def test_the_wrapper_keeps_only_its_own_state_lean():
    params = large()
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.01), state_dtype="bfloat16")
    train(optimizer, params, 2)
    state = optimizer.state[params[0]]
    assert state["cprop_m"].dtype == state["cprop_v"].dtype == torch.bfloat16
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("wrapper", [False, True], ids=["native", "wrapper"])
def test_what_is_not_computed_in_float32_is_not_stored_in_less(wrapper, dtype, way):
    ends = []
    for chosen in ("float32", "bfloat16"):
        params = [torch.nn.Parameter(p.detach().to(dtype)) for p in large()]
        if wrapper:
            optimizer = cprop.CProp(torch.optim.SGD(params, lr=0.01), state_dtype=chosen, **WAYS[way])
        else:
            optimizer = cprop.CPropAdam(params, lr=0.01, cprop_state_dtype=chosen, **WAYS[way])
        train(optimizer, params, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, params, 1, start=2)
        assert all(optimizer.state[p]["cprop_m"].dtype == dtype for p in params)
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"invalid cprop_state_dtype 'int4': choose one of 'float32', 'bfloat16'$"):
        cprop.CPropAdam(inputs(), cprop_state_dtype="int4")


@pytest.mark.slow
def test_gradients_in_half_precision_with_lean_state():
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in large()]
    optimizer = cprop.CPropAdam(params, lr=0.01, cprop_state_dtype="bfloat16", fused=True)
    for step in range(5):
        gradients(params, step)
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in params)


def test_the_wrappers_snapshot_is_its_only_temporary_and_its_memory_is_used_again():
    params = [torch.nn.Parameter(torch.randn(64, 32))]
    optimizer = cprop.CProp(torch.optim.SGD(params, lr=0.01))
    train(optimizer, params, 1)
    (snapshot,) = optimizer._snapshots.values()
    address = snapshot.copy.data_ptr()
    train(optimizer, params, 3)
    (snapshot,) = optimizer._snapshots.values()
    assert snapshot.copy.data_ptr() == address
    params[0].data = params[0].data.t().contiguous().double()  # another shape and dtype under the same parameter
    optimizer.state.clear()
    train(optimizer, params, 1)
    (snapshot,) = optimizer._snapshots.values()
    assert (snapshot.copy.shape, snapshot.copy.dtype) == (params[0].shape, torch.float64)
    assert "_snapshots" not in copy.deepcopy(optimizer).__dict__


# --- weights in bfloat16 --------------------------------------------------------------------------

ROUND = {"cprop_stochastic_rounding": True}


def small_updates(build, *, dtype=torch.bfloat16, steps=30, **settings):
    """Train weights between one and two, where bfloat16 counts by 1 / 128, in steps of about 1 / 1000."""
    p = torch.nn.Parameter(torch.linspace(1, 1.9, 2048).to(dtype))
    optimizer = build([p], **{"lr": 1e-3, **settings})
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = (1 + 0.1 * torch.randn(2048, generator=generator)).to(dtype)
        optimizer.step()
    return p.detach()


SIGN_LIKE = {  # updates of about the learning rate from the first step
    cprop.CPropAdam: {},
    cprop.CPropAdamW: {},
    cprop.CPropSGD: {},
    cprop.CPropRMSprop: {"alpha": 0.0},
    cprop.CPropAdaBound: {"final_lr": 0.01},
}


@pytest.mark.parametrize(
    ("cls", "way"),
    [*((cls, way) for cls in SIGN_LIKE for way in ("for-loop", "foreach")), (cprop.CPropAdamW, "fused")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_stochastic_rounding_keeps_updates_that_nearest_rounding_loses(cls, way):
    settings = SIGN_LIKE[cls]
    start = torch.linspace(1, 1.9, 2048).bfloat16()
    exact = small_updates(cls, dtype=torch.float32, **settings)
    nearest = small_updates(cls, **settings, **WAYS[way])
    rounded = small_updates(cls, **settings, **WAYS[way], **ROUND)
    assert (exact - start.float()).mean() < -0.02
    assert torch.equal(nearest, start)  # not one update of the thirty was large enough
    assert (rounded.float() - exact).mean().abs() < 1e-3


def final_loss(dtype, **settings):
    """Least squares with 64 unknown weights between one and two, over noisy measurements."""
    weights, start = torch.linspace(1, 1.9, 64), torch.full((64,), 1.5)
    model = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = cprop.CPropAdamW([model], lr=3e-3, weight_decay=0.0, **settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        inputs = torch.randn(64, 64, generator=generator)
        targets = inputs @ weights + 0.1 * torch.randn(64, generator=generator)
        optimizer.zero_grad()
        (inputs.to(dtype) @ model - targets.to(dtype)).square().mean().backward()
        optimizer.step()
    return (model.detach().float() - weights).square().sum().item() / (start - weights).square().sum().item()


def test_weights_in_pure_bfloat16_are_trained_with_stochastic_rounding_and_hardly_without():
    assert final_loss(torch.float32) < 0.01
    assert final_loss(torch.bfloat16) > 0.9
    assert final_loss(torch.bfloat16, **ROUND) < 0.01


@pytest.mark.parametrize("way", WAYS)
def test_stochastic_rounding_resumes_to_the_bit(way):
    def build():
        params = inputs(torch.bfloat16)
        return ROUNDED.build(params, **WAYS[way]), params

    optimizer, params = build()
    train(optimizer, params, 10)
    buffer = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in params]), buffer)
    buffer.seek(0)
    resumed, resumed_params = build()
    assert resumed.param_groups[0]["cprop_stochastic_rounding"]
    state, values = torch.load(buffer, weights_only=True)
    resumed.param_groups[0]["cprop_stochastic_rounding"] = False  # the checkpoint brings it
    resumed.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(resumed_params, values, strict=True):
            p.copy_(value)
    train(optimizer, params, 10, start=10)
    train(resumed, resumed_params, 10, start=10)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))
    plain, others = cprop.CPropAdamW(inputs(torch.bfloat16)), inputs(torch.bfloat16)
    assert not plain.param_groups[0]["cprop_stochastic_rounding"]
    train(ROUNDED.cls(others, lr=0.01, **WAYS[way]), others, 20)
    assert not all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_the_slices_of_a_parameter_are_rounded_as_the_whole(layout, way, monkeypatch):
    def trained():
        shape, generator = (6, 5, 4, 7), torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        if layout == "transposed":
            p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "channels_last":
            p.data = p.data.to(memory_format=torch.channels_last)
        train(ROUNDED.build([p], cprop_state_dtype="bfloat16", **WAYS[way]), [p], 10)
        return p.detach()

    whole = trained()
    monkeypatch.setattr(for_loop, "SLICE", 77)
    assert torch.equal(trained(), whole)


def test_stochastic_rounding_is_for_bfloat16_alone():
    ends = []
    for settings in ({}, ROUND):
        params = [*inputs(torch.float32), *inputs(torch.float16), *inputs(torch.float64)]
        ends.append(train(cprop.CPropAdamW(params, lr=0.01, **settings), params, 5))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_stochastic_rounding_differs_between_groups_and_may_be_switched_on_in_mid_training():
    params = [torch.nn.Parameter(torch.linspace(1, 1.9, 512).bfloat16()) for _ in range(2)]
    start = params[0].detach().clone()
    optimizer = cprop.CPropSGD([{"params": params[:1], **ROUND}, {"params": params[1:]}], lr=1e-3)

    def steps():
        for _ in range(10):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()

    steps()
    assert not torch.equal(params[0], start)
    assert torch.equal(params[1], start)
    optimizer.param_groups[1].update(ROUND)
    steps()
    assert not torch.equal(params[1], start)


@pytest.mark.parametrize("name", ["stochastic_rounding", "cprop_stochastic_rounding"])
def test_the_wrapper_says_that_it_always_rounds_stochastically(name):
    with pytest.raises(TypeError, match=f"{name}': leave it out, the wrapper always rounds bfloat16 parameters"):
        cprop.CProp(torch.optim.SGD(large(), lr=0.1), **{name: True})
    with pytest.raises(TypeError, match="'stochastic_rounding': write cprop_stochastic_rounding"):
        cprop.CPropSGD(large(), lr=0.1, stochastic_rounding=True)


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
