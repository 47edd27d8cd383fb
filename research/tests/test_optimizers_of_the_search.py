"""The optimizers that the search tried."""

import math

import pytest
import research
import torch
from research.averaging import GPACProp, ScheduleFreeCProp
from research.muon import MuonSNR, MuonVS
from test_figures import figures, legend_of, lines_of, make, specification, store
from test_peers import lowers_a_loss, trained, two_layers
from test_training import BLOBS, stopped_and_resumed_is_not_stopped_to_the_bit
from torch import nn

import cprop
from cprop_lab.run import optimizers
from cprop_lab.run.names import PAPERS_EPS
from cprop_lab.run.peers import Muon, groups, orthogonalize
from cprop_lab.run.specification import Specification

__all__ = ["make", "store"]  # fixtures


@pytest.mark.parametrize("name", research.RECIPES)
def test_every_one_lowers_a_loss(name):
    lowers_a_loss(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", research.RECIPES)
def test_each_is_resumed_to_the_bit(name, tmp_path):
    stopped_and_resumed_is_not_stopped_to_the_bit(BLOBS.replace(optimizer=name), tmp_path)


def test_without_an_average_gpa_with_cprop_is_cprop_around_the_optimizer_inside():
    ours, theirs = two_layers(), two_layers()
    expected = trained(theirs, cprop.CProp(Muon(groups(theirs), lr=0.02, betas=(0.9, 0.999)), eps=PAPERS_EPS))
    found = trained(ours, GPACProp(groups(ours), lr=0.02, mu_x=0.0))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_muon_vs_is_its_papers():
    """Two steps of its algorithm, written out in float64."""
    mu = 0.95
    first, second = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = MuonVS([{"params": [p], "orthogonal": True}], lr=1.0)
    for p.grad in (first.clone(), second.clone()):
        before = p.detach().clone()
        optimizer.step()
    m = (1 - mu) * first
    gamma = mu * (1 - mu) * first**2
    gamma = mu * gamma + mu * (1 - mu) * (m - second) ** 2
    m = mu * m + (1 - mu) * second
    ahead = second + mu / (1 - mu) * m / (1 - mu**2)
    expected = 0.2 * math.sqrt(6) * orthogonalize(ahead / (gamma / (1 - mu**2)).sqrt())
    torch.testing.assert_close(before - p.detach(), expected)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_muon_snr_estimates_the_noise_of_its_momentum(shape):
    mu, kappa = 0.95, 2.0
    p = nn.Parameter(torch.zeros(shape, dtype=torch.double))
    optimizer = MuonSNR([{"params": [p], "orthogonal": True}], lr=1.0, noise=kappa)
    seen = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    for p.grad in seen.unbind():
        before = p.detach().clone()
        optimizer.step()
    seen = seen if shape[0] < shape[1] else seen.mT
    weights = (1 - mu) * mu ** torch.arange(4.0, -1, -1, dtype=torch.double)
    b = torch.einsum("t,tij->ij", weights, seen)
    # The weighted variance of a gradient, times what is left of it in a long exponential mean.
    spread = torch.einsum("t,tij->i", weights, (seen - b / weights.sum()).square())
    noise = kappa**2 * weights.sum() * spread * (1 - mu) / (2 * mu)
    expected = 0.2 * math.sqrt(6) * orthogonalize((1 - mu) * seen[-1] + mu * b, noise)
    torch.testing.assert_close(before - p.detach(), expected if shape[0] < shape[1] else expected.mT)


def test_muon_snr_without_noise_is_muon():
    p, q = (nn.Parameter(torch.zeros(4, 6)) for _ in range(2))
    for optimizer in (
        MuonSNR([{"params": [p], "orthogonal": True}], lr=1.0),
        Muon([{"params": [q], "orthogonal": True}], lr=1.0),
    ):
        (w,) = optimizer.param_groups[0]["params"]
        for _ in range(5):
            w.grad = torch.arange(24.0).view(4, 6).sin()  # the same at every step
            optimizer.step()
    torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-3)


def test_schedule_free_with_infinite_confidence_is_schedule_free():
    """Against the authors' package, step by step, at both places where the weights are."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Linear(7, 1, bias=False, dtype=torch.float64) for _ in range(2)]
    ours, theirs = (torch.nn.init.ones_(layer.weight) for layer in layers)
    run = Specification("tasks:Blobs", "schedule-free-cprop", lr=0.1)
    scaled, _ = optimizers.build(run.replace(settings={"c": math.inf}), layers[0])
    peer, _ = optimizers.build(run.replace(optimizer="schedule-free-adamw"), layers[1])
    for _ in range(50):
        g = torch.randn(1, 7, generator=generator, dtype=torch.float64)
        for p, optimizer in ((ours, scaled), (theirs, peer)):
            optimizer.train()
            p.grad = g.clone()
            optimizer.step()
            optimizer.eval()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    with pytest.raises(RuntimeError, match=r"call train\(\) before step\(\)"):
        scaled.step()


def test_a_rule_of_its_own_that_scales_another_optimizer_is_drawn_as_that_one_with_cprop(make):
    rows = ("schedule-free-cprop", "sgd", "schedule-free-adamw")
    figure = figures.curves(make({specification(name): [8, 4, 2, 2, 1] for name in rows}))
    assert legend_of(figure) == ["Schedule-Free AdamW", "Schedule-Free CProp", "SGD"]
    plain, scaled, _ = lines_of(figure.axes[0])
    assert plain.get_color() == scaled.get_color()
    assert (plain.get_linestyle(), scaled.get_linestyle()) == ("--", "-")


@pytest.mark.parametrize("optimizer", [GPACProp, ScheduleFreeCProp])
def test_candidates_keep_the_papers_eps_which_their_committed_runs_had(optimizer):
    def moved(size):
        p = nn.Parameter(torch.zeros(100))
        trained = optimizer([p], lr=1.0, c=1.0, eps=0.0)
        trained.train()
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            p.grad = size * (1 + torch.randn(100, generator=generator))
            trained.step()
        return p.detach().abs().mean()

    assert moved(1e-10) < 0.1 * moved(1e-2)
