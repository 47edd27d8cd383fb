"""What a gradient may be: absent, NaN, infinite, too large, clipped, sparse, of a graph or of inference mode."""

import math

import pytest
import torch
from table import (
    TABLE,
    WAYS,
    cases,
    every_build_in_every_way,
    every_optimizer,
    gradients,
    inputs,
    prefixed,
    same,
    train,
)

import cprop
from cprop.execution.foreach import TensorList
from cprop.rules import GRAD, with_finite_grad

BAD = [torch.nan, torch.inf, -torch.inf]


def finite(optimizer, params):
    tensors = [p.detach() for p in params]
    tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    return all(torch.isfinite(torch.view_as_real(x) if x.is_complex() else x).all() for x in tensors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", cases(TABLE))
def test_one_bad_batch_does_not_poison_anything(entry, way):
    """What is no number counts as a gradient of zero, element by element, and everything else goes on."""
    ours, theirs = inputs(), inputs()
    optimizers = [entry.build(ps, **prefixed(entry, WAYS[way])) for ps in (ours, theirs)]
    for step in range(12):
        for params, optimizer, bad in zip((ours, theirs), optimizers, (True, False), strict=True):
            gradients(params, step)
            if step == 5:
                for i, value in enumerate(BAD):
                    params[4].grad[0, 0, 0, i] = value if bad else 0.0
                params[1].grad.fill_(torch.nan if bad else 0.0)
            optimizer.step()
    assert finite(optimizers[0], ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bad_numbers_in_other_precisions(dtype):
    params = inputs(dtype)
    optimizer = cprop.CPropAdam(params, lr=0.01)
    train(optimizer, params, 3)
    gradients(params, 3)
    params[2].grad[0, 0] = torch.inf
    params[2].grad[0, 1] = torch.nan
    optimizer.step()
    assert finite(optimizer, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usable_keeps_every_number_that_can_be_squared(dtype):
    limit = 2.0 ** (60 if dtype == torch.float32 else 508)
    kept = torch.tensor([0.0, -0.0, 1e-45, -1e-38, -0.999 * limit, 0.999 * limit], dtype=dtype)
    dropped = torch.tensor([*BAD, limit, -limit, torch.finfo(dtype).max], dtype=dtype)
    for wrap in (lambda x: x, lambda x: TensorList([x])):
        results = [getattr(with_finite_grad({GRAD: wrap(x)})[GRAD], "tensors", None) for x in (kept, dropped)]
        results = [
            with_finite_grad({GRAD: x})[GRAD] if r is None else r[0]
            for x, r in zip((kept, dropped), results, strict=True)
        ]
        assert torch.equal(results[0].view(torch.int8), kept.view(torch.int8))  # the sign of zero, too
        assert torch.equal(results[1], torch.zeros_like(dropped))


def test_the_wrapper_zeroes_what_is_no_number_in_the_gradient_and_nothing_else():
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = cprop.CProp(torch.optim.Adam([w], lr=0.1))
    w.grad = torch.tensor([1.0, torch.nan, -torch.inf, 2.0])
    optimizer.step()
    assert w.grad.tolist() == [1.0, 0.0, 0.0, 2.0]
    w.grad = torch.tensor(3.0).expand(4)  # one element in memory: not ours to write to
    optimizer.step()
    assert w.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize("entry", TABLE[:12:5], ids=lambda entry: entry.id)
def test_clipping_and_accumulation_are_seen_as_any_gradient(entry):
    """What the statistics see is ``p.grad`` as it is when ``step`` is called."""
    clipped, direct = inputs(), inputs()
    on_clipped, on_direct = entry.build(clipped), entry.build(direct)
    for step in range(5):
        gradients(clipped, step)
        norm = torch.nn.utils.clip_grad_norm_(clipped, 0.5)
        gradients(direct, step)
        for p in direct:
            p.grad = (p.grad / 2) * torch.clamp(0.5 / (norm + 1e-6), max=1.0)
            p.grad += p.grad.clone()  # accumulated from two halves
        on_clipped.step()
        on_direct.step()
    for a, b in zip(clipped, direct, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("entry", cases(TABLE))
def test_a_layer_frozen_for_a_while_goes_on_where_it_was(entry):
    """Steps without a gradient do not count: the other layer has never been away."""
    frozen, alone = inputs(), inputs()
    optimizer, on_alone = entry.build(frozen), entry.build(alone[:1] + alone[2:])
    untouched = inputs()[1:2]
    on_untouched = entry.build(untouched)
    for step in range(12):
        gradients(frozen, step)
        gradients(alone, step)
        if 4 <= step < 8:
            frozen[1].grad = None
        else:
            untouched[0].grad = frozen[1].grad.clone()
            on_untouched.step()
        optimizer.step()
        on_alone.step()
    assert torch.equal(frozen[1], untouched[0])
    assert torch.equal(frozen[2], alone[2])


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
