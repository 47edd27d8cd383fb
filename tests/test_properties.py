"""What must hold for any gradients: properties of the scale, checked by search."""

import math

import numpy as np
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
