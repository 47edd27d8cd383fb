"""What must hold for any gradients: properties of the scale, checked by search."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from oracle import Oracle

import cprop

# Below 1e-19 the square of a float32 vanishes: a mean square cannot tell such a gradient from zero.
finite = st.floats(-1e6, 1e6, width=32).map(lambda g: 0.0 if abs(g) < 1e-16 else g)
streams = npst.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 4)), elements=finite)
betas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999])
epsilons = st.sampled_from([0.0, 1e-12, 1e-8, 1e-3])
measures = st.sampled_from(list(cprop.MEASURES))
coefficients = st.floats(0.01, 100) | st.just(math.inf)


def final_scale(stream, *, beta=0.999, c=1.0, eps=0.0, measure="normal"):
    """The scale after a stream of gradients, by way of a real optimizer."""
    w = torch.nn.Parameter(torch.zeros(stream.shape[1]))
    optimizer = cprop.CPropSGD([w], lr=0.0, cprop_beta=beta, cprop_c=c, cprop_eps=eps, cprop_measure=measure)
    for g in stream:
        w.grad = torch.tensor(g)
        optimizer.step()
    ((_, scale),) = optimizer.scales()
    return scale


@given(streams, betas, epsilons, measures, coefficients)
def test_scale_is_between_zero_and_one(stream, beta, eps, measure, c):
    scale = final_scale(stream, beta=beta, eps=eps, measure=measure, c=c)
    assert torch.all((scale >= 0) & (scale <= 1)), scale


@given(streams, betas, epsilons, measures)
def test_scale_is_symmetric_in_sign(stream, beta, eps, measure):
    options = {"beta": beta, "eps": eps, "measure": measure}
    assert torch.equal(final_scale(stream, **options), final_scale(-stream, **options))


@given(streams, betas, measures, coefficients, coefficients)
def test_scale_does_not_decrease_in_c(stream, beta, measure, c1, c2):
    low, high = sorted([c1, c2])
    options = {"beta": beta, "measure": measure}
    assert torch.all(final_scale(stream, c=low, **options) <= final_scale(stream, c=high, **options))


@given(
    st.floats(2.0**-10, 1e6, width=32) | st.floats(-1e6, -(2.0**-10), width=32),
    st.integers(1, 100),
    betas,
    measures,
)
def test_constant_gradients_have_scale_one(g, steps, beta, measure):
    scale = final_scale(np.full((steps, 1), g, dtype=np.float32), beta=beta, measure=measure)
    torch.testing.assert_close(scale, torch.ones(1), atol=3e-5, rtol=0)


@given(streams, betas, st.integers(-20, 20), measures)
def test_without_eps_powers_of_two_change_nothing(stream, beta, exponent, measure):
    # Within the range in which float32 squares neither vanish nor overflow.
    stream = np.where(np.abs(stream) < 1e-6, 0, stream).astype(np.float32)
    options = {"beta": beta, "eps": 0.0, "measure": measure}
    assert torch.equal(final_scale(stream, **options), final_scale(stream * 2.0**exponent, **options))


@given(streams, st.sampled_from([0.5, 0.9, 0.99, 0.999, 0.9999]), st.sampled_from([0.0, 1e-8, 1e-3]))
def test_scale_is_within_1e5_of_the_oracle(stream, beta, eps):
    oracle = Oracle(beta, eps=eps)
    for g in stream:
        oracle.observe(g)
    np.testing.assert_allclose(final_scale(stream, beta=beta, eps=eps).numpy(), oracle.scale(), atol=1e-5)


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
