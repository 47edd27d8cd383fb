"""The mathematics against the paper: Algorithm 1 in float64, and section 2's other measures."""

import math

import numpy as np
import pytest
import torch
from oracle import Oracle
from scipy import stats

import cprop
from cprop.measures import LOGISTIC_SLOPE, resolve_measure
from cprop.moments import Moments
from cprop.statistics import MEAN, MEAN_ABS, MEAN_SQUARE, scale_from, statistics_scalars, update_statistics


def settings(beta=0.999, c=1.0, eps=0.0):
    return {"cprop_beta": beta, "cprop_c": c, "cprop_eps": eps}


def scales_over_time(gradients, measure="normal", dtype=torch.float32, tensor_counter=False, **kwargs):
    """The library's own statistics, fed gradient by gradient as an optimizer feeds them."""
    state = {key: torch.zeros(gradients.shape[1:], dtype=dtype) for key in (MEAN, MEAN_SQUARE, MEAN_ABS)}
    for t, g in enumerate(gradients.to(dtype), start=1):
        h = statistics_scalars(settings(**kwargs), torch.tensor(float(t)) if tensor_counter else t)
        state = update_statistics(g, state, h)
        yield scale_from(state, h, measure)


WIDTH = 100


def streams(steps=3000, width=WIDTH):
    """Gradients of many kinds, one step per row: the cases where float32 might lose its digits."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(steps, width, generator=generator)
    ramp = torch.linspace(-1, 1, width)
    return {
        "noise": noise,
        "signal in noise": noise + 0.3 * ramp,
        "signal": 1e-3 * noise + ramp,
        "almost constant": 1e-6 * noise + 1,
        "constant": torch.ones(steps, width) * (1 + ramp) * 0.731,
        "zero": torch.zeros(steps, width),
        "zero, then noise": torch.cat([torch.zeros(100, width), noise[100:]]),
        "alternating": torch.ones(steps, width) * torch.tensor([1.0, -1.0]).repeat(steps // 2)[:, None],
        "rare": noise * (torch.rand(steps, width, generator=generator) < 0.01),
        "small": 1e-6 * (noise + ramp),
        "large": 1e6 * (noise + ramp),
        "spread": noise * torch.logspace(-6, 6, width),
    }


STREAMS = streams()


@pytest.mark.parametrize(
    "beta", [0.0, 0.5, 0.9, 0.99, *(pytest.param(b, marks=pytest.mark.slow) for b in (0.999, 0.9999))]
)
def test_float32_is_within_1e5_of_the_oracle_at_every_step(beta):
    """All streams side by side, and the step both as a number and as a tensor."""
    gradients = torch.cat([*STREAMS.values()], dim=1)[: 3000 if beta > 0.99 else 600]
    oracle = Oracle(beta)
    runs = (scales_over_time(gradients, beta=beta, tensor_counter=counter) for counter in (False, True))
    for t, (g, *scales) in enumerate(zip(gradients, *runs, strict=True), start=1):
        expected = oracle.observe(g).scale()
        for scale in scales:
            error = np.abs(scale.double().numpy() - expected)
            worst = [*STREAMS][error.argmax() // WIDTH]
            assert error.max() < 1e-5, f"{worst}, step {t}"  # fails for NaN too


def test_first_step_takes_every_element_in_full():
    # At t = 1 there is no variance, and n - 1 = 0: rounding noise over eps must not become a scale.
    g = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    (scale,) = scales_over_time(g[None])
    assert torch.equal(scale, torch.ones_like(scale))


@pytest.mark.parametrize("measure", cprop.MEASURES)
@pytest.mark.parametrize("beta", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_horizon_of_one_step_takes_every_gradient_in_full_with_a_tensor_for_a_counter(measure, beta):
    g = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
    for scale in scales_over_time(g, measure, tensor_counter=True, beta=beta, eps=0.0):
        torch.testing.assert_close(scale, torch.ones(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("measure", ["student_t", "moment_rate", "relative_rate"])
@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_other_measures_follow_their_formulas(measure, beta):
    gradients = STREAMS["signal in noise"][:200]
    oracle = Oracle(beta)
    # The t-distribution between one and two degrees of freedom, met at t = 3 alone, costs 2e-4.
    for t, (g, scale) in enumerate(zip(gradients, scales_over_time(gradients, measure, beta=beta), strict=True), 1):
        tolerance = 2e-4 if measure == "student_t" and t <= 3 else 1e-5
        np.testing.assert_allclose(scale.numpy(), oracle.observe(g).scale(measure), atol=tolerance)


@pytest.mark.parametrize("nu", [1, 2, 2.5, 4, 9, 30, 999, 1e6])
def test_student_t_is_students_distribution(nu):
    z = np.concatenate([np.linspace(0, 10, 1001), np.logspace(1, 8, 200)])
    # m_hat = z, sigma = 1: v_hat = z^2 + nu
    moments = Moments.of(torch.tensor(z), torch.tensor(z**2 + nu), nu + 1.0, 0.0)
    np.testing.assert_allclose(cprop.MEASURES["student_t"](moments), 2 * stats.t.cdf(z, nu) - 1, atol=1e-6)


def test_logistic_is_within_its_stated_error_of_the_normal_and_no_slope_is_nearer():
    z = np.linspace(0, 10, 100_001)
    normal = 2 * stats.norm.cdf(z) - 1

    def error(slope):
        return np.abs(np.tanh(slope * z / 2) - normal).max()

    assert 0.0185 < error(LOGISTIC_SLOPE) < 0.0190
    assert error(LOGISTIC_SLOPE) < min(error(LOGISTIC_SLOPE - 0.01), error(LOGISTIC_SLOPE + 0.01))
    moments = Moments.of(torch.tensor(z), torch.tensor(z**2 + 1), 2.0, 0.0)
    np.testing.assert_allclose(cprop.MEASURES["logistic"](moments), np.tanh(LOGISTIC_SLOPE * z / 2), atol=1e-9)


@pytest.mark.parametrize("measure", cprop.MEASURES)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_zero_gradients_give_zero_and_never_nan(measure, eps):
    for scale in scales_over_time(torch.zeros(5, 3), measure, eps=eps):
        assert torch.equal(scale, torch.zeros(3))


@pytest.mark.parametrize("measure", cprop.MEASURES)
@pytest.mark.parametrize("exponent", [-30, -7, 1, 25])
def test_without_eps_the_scale_does_not_depend_on_the_gradients_size(measure, exponent):
    gradients = STREAMS["signal in noise"][:100]
    plain = scales_over_time(gradients, measure, eps=0.0)
    scaled = scales_over_time(gradients * 2.0**exponent, measure, eps=0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_without_eps_size_matters_where_the_documentation_says():
    """Below 1e-19, or 1e-16 if denormals are flushed, squares vanish; float64 has room to 1e-34."""
    gradients = STREAMS["signal in noise"][:300].double()

    def last(size, dtype=torch.float32):
        *_, scale = scales_over_time(gradients * size, dtype=dtype)
        return scale.double()

    usual = last(1.0)
    torch.testing.assert_close(last(1e-19), usual, atol=1e-3, rtol=0)
    torch.testing.assert_close(last(1e-34, torch.float64), usual, atol=1e-2, rtol=0)
    for size in (1e-23, 1e-30, 1e-34):
        assert torch.equal(last(size), torch.ones(WIDTH).double())
    try:
        if torch.set_flush_denormal(True):  # as the processor allows
            torch.testing.assert_close(last(1e-16), usual, atol=1e-3, rtol=0)
            for size in (1e-20, 1e-30, 1e-34):
                assert torch.equal(last(size), torch.ones(WIDTH).double())
    finally:
        torch.set_flush_denormal(False)


def test_eps_shuts_small_gradients_down_and_the_default_lets_them_through():
    # Gradients of 1e-7, as large models have: their standard error is below eps = 1e-8.
    gradients = 1e-7 * (0.1 + torch.randn(1000, 50, generator=torch.Generator().manual_seed(0)))
    *_, held_back = scales_over_time(gradients, eps=1e-8)
    *_, free = scales_over_time(gradients)
    assert held_back.mean() < 0.75 * free.mean()


def test_infinite_c_is_one_everywhere():
    zero = torch.zeros(3)
    assert torch.equal(cprop.conformity_scale(zero, zero, 1.0, c=math.inf), torch.ones(3))
    assert torch.equal(cprop.conformity_scale(zero, zero, 1.0, c=torch.tensor(math.inf)), torch.ones(3))


def test_c_may_be_a_tensor():
    m_hat, v_hat = torch.rand(50), torch.rand(50) + 1
    by_tensor = cprop.conformity_scale(m_hat, v_hat, torch.tensor(5.0), c=torch.tensor(1.7))
    torch.testing.assert_close(by_tensor, cprop.conformity_scale(m_hat, v_hat, 5.0, c=1.7))


def test_any_callable_is_a_measure():
    def sign_test(moments):
        return (moments.m_hat.abs() > 0.5).float()

    m_hat = torch.tensor([0.1, 0.9])
    assert torch.equal(cprop.conformity_scale(m_hat, m_hat, 3.0, measure=sign_test), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    m_hat, v_hat = torch.tensor([0.5], dtype=dtype), torch.tensor([2.0], dtype=dtype)
    scale = cprop.conformity_scale(m_hat, v_hat, 10.0)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, cprop.conformity_scale(m_hat.float(), v_hat.float(), 10.0))


def test_float64_stays_float64():
    one = torch.ones(1, dtype=torch.float64)
    assert cprop.conformity_scale(one, 2 * one, 10.0).dtype == torch.float64


def test_standard_error_is_the_papers():
    gradients = torch.randn(1, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, mean_square, n = gradients.mean(), gradients.square().mean(), gradients.numel()
    standard_error = gradients.std(correction=1) / math.sqrt(n)
    torch.testing.assert_close(Moments.of(mean, mean_square, n, 0.0).z, mean.abs() / standard_error)


def test_relative_rate_asks_for_the_mean_it_needs():
    with pytest.raises(ValueError, match=r"needs the running mean of \|g\|: pass it as a_hat=\.\.\., or choose"):
        cprop.conformity_scale(torch.ones(1), torch.ones(1), 2.0, measure="relative_rate")


def test_unknown_measure_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown measure 'norml': choose one of 'normal', 'student_t', .* callable"):
        resolve_measure("norml")
