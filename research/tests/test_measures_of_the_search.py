"""The measures that the search tried."""

import math

import pytest
import torch
from research.measures import MEASURES, exact_count, z_of_exact_count
from test_training import a_layers_scale_is_the_same_for_all_of_its_parameters

from cprop import Moments
from cprop.moments import Corrections
from cprop_lab.run.measures import conformity


def test_the_scale_of_a_whole_layer_is_the_same_for_all_of_its_parameters():
    a_layers_scale_is_the_same_for_all_of_its_parameters("whole_layer")


def test_a_whole_layer_is_as_certain_as_its_mean_gradient_is_long():
    """By hand: means 3 and 4, variances 100 - 9 and 100 - 16 over n - 1 = 7, so z^2 = 25 / 25."""
    moments = Moments.of(torch.tensor([3.0, -4.0]), torch.full((2,), 100.0), n=8.0, eps=0.0)
    torch.testing.assert_close(MEASURES["whole_layer"](moments), torch.full((2,), math.erf(math.sqrt(0.5))))


def noise(steps=4_000, elements=5_000):
    """The moments of pure noise, whose mean is zero."""
    beta, generator = 0.999, torch.Generator().manual_seed(0)
    m, v = torch.zeros(elements), torch.zeros(elements)
    for _ in range(steps):
        g = torch.randn(elements, generator=generator)
        m.lerp_(g, 1 - beta)
        v.lerp_(g * g, 1 - beta)
    b = 1 - beta**steps
    return Moments(m, v, Corrections.of(b / (1 - beta), 1e-8, b, b))


def test_with_the_exact_count_the_conformity_of_noise_is_uniform():
    moments = noise()
    assert z_of_exact_count(moments).square().mean().sqrt().item() == pytest.approx(1, abs=0.03)
    s = exact_count(moments)
    quartiles = torch.quantile(s, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.03, rtol=0)
    assert conformity(moments).mean().item() == pytest.approx(0.39, abs=0.02)


@pytest.mark.parametrize("name", [name for name in MEASURES if name.startswith("relative_")])
def test_relative_measures_tell_apart_and_do_not_slow_down(name):
    moments = noise(500, 1_000)
    measure = MEASURES[name]
    found, s = measure(moments), conformity(moments)
    factor = found * measure.bound / s.mean() ** measure.slowing
    assert factor.max() <= measure.bound * (1 + 1e-6)
    below = s < measure.bound * s.mean()
    torch.testing.assert_close(factor[below], (s / s.mean())[below])
    assert found.min() >= 0
    assert found.max() <= 1
