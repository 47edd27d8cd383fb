"""The peers that the laboratory writes itself, against the packages and papers they come from."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import cprop
from cprop_lab.models import AWDLSTM, GPT, WordTransformer, fully_connected
from cprop_lab.run import optimizers
from cprop_lab.run.averaging import GPA, ScheduleFreeCProp
from cprop_lab.run.names import PAPERS_EPS, RECIPES
from cprop_lab.run.peers import QUINTIC, CautiousAdamW, Muon, MuonSNR, MuonVS, groups, orthogonalize
from cprop_lab.run.specification import Specification


def trained(model, optimizer, steps=10):
    """The parameters after some steps on fixed random gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 9, bias=False), nn.Linear(9, 3))


def both_of_torch(model, **settings):
    """torch's Muon for the hidden matrices and its AdamW for the rest."""
    hidden, rest = (group["params"] for group in groups(model))
    muon = torch.optim.Muon(hidden, momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), **settings)

    class Both:
        def step(self):
            muon.step()
            adamw.step()

    return Both()


def test_muon_is_torchs_in_float32(monkeypatch):
    """To float32's accuracy, once torch's orthogonalisation is not in bfloat16."""
    ours, theirs = two_layers(), two_layers()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    expected = trained(theirs, both_of_torch(theirs, lr=0.02, weight_decay=0.1))
    found = trained(ours, Muon(groups(ours), lr=0.02, weight_decay=0.1))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_muon_is_close_to_torchs_in_bfloat16():
    ours, theirs, start = two_layers(), two_layers(), two_layers()
    expected = trained(theirs, both_of_torch(theirs, lr=0.02, weight_decay=0.0), steps=1)
    found = trained(ours, Muon(groups(ours), lr=0.02), steps=1)
    for one, other, before in zip(found, expected, start.parameters(), strict=True):
        assert (one - other).norm() < 0.03 * (one - before).norm()


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


def test_noise_is_a_matrix_beside_the_other():
    """The polar factor of [M, sqrt(D)] is (MM' + D)^(-1/2) [M, sqrt(D)]."""
    generator = torch.Generator().manual_seed(0)
    matrix, noise = torch.randn(4, 7, generator=generator), torch.rand(4, generator=generator)
    beside = orthogonalize(torch.cat([matrix, torch.diag(noise.sqrt())], 1))
    torch.testing.assert_close(orthogonalize(matrix, noise), beside[:, :7])
    torch.testing.assert_close(orthogonalize(matrix.T, noise), beside[:, :7].T)


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


def test_filters_are_rows_of_a_matrix():
    p, flat = (nn.Parameter(torch.zeros(shape)) for shape in ((4, 2, 3, 3), (4, 18)))
    g = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for parameter, gradient in ((p, g), (flat, g.view(4, 18))):
        parameter.grad = gradient.clone()
        Muon([{"params": [parameter], "orthogonal": True}], lr=0.1).step()
    torch.testing.assert_close(p.detach().view(4, 18), flat.detach())
    values = torch.linalg.svdvals(flat.detach() / (0.1 * 0.2 * math.sqrt(18)))
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("noise", [1.0, 1e-3])  # with a small one, most singular values are far below the largest
def test_orthogonalize_is_the_usual_iteration(noise):
    matrix = torch.randn(20, 8) @ torch.randn(8, 50) + noise * torch.randn(20, 50)
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = QUINTIC[0] * x + (QUINTIC[1] * gram + QUINTIC[2] * gram @ gram) @ x
    torch.testing.assert_close(orthogonalize(matrix), x.float(), rtol=0, atol=1e-4)


def test_orthogonalize_takes_tall_and_wide_matrices():
    wide = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalize(wide), orthogonalize(wide.T.contiguous()).T)


@pytest.mark.parametrize(
    ("model", "visible"),
    [
        (lambda: GPT(50, 16), {"embedding.weight", "position.weight"}),
        (lambda: WordTransformer(50), {"embedding.weight", "decoder.weight"}),
        (lambda: AWDLSTM(50, 8, 16), {"embedding.weight"}),
        (fully_connected, {"linear"}),
    ],
    ids=["gpt", "word", "lstm", "fully-connected"],
)
def test_embeddings_and_the_output_layer_are_not_hidden(model, visible):
    model = model()
    hidden, rest = (set(map(id, group["params"])) for group in groups(model))
    assert len(hidden) + len(rest) == len(list(model.parameters()))
    left_out = {name for name, p in model.named_parameters() if p.ndim > 1 and id(p) in rest}
    if visible == {"linear"}:
        assert left_out == {[name for name, p in model.named_parameters() if p.ndim > 1][-1]}
    else:
        assert left_out == visible


def test_cautious_adamw_is_its_papers():
    """Algorithm 1, with the authors' floor of 1e-3 under the mean of the mask."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = CautiousAdamW([p], lr=0.1, weight_decay=0.01)
    theta, m, v = torch.ones(5, dtype=torch.float64), torch.zeros(5), torch.zeros(5)
    for t in range(1, 30):
        g = torch.randn(5, generator=generator, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mask = (m * g > 0).double()
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        theta = theta * (1 - 0.1 * 0.01) - 0.1 * update * mask / max(mask.mean().item(), 1e-3)
        torch.testing.assert_close(p.detach(), theta)


def test_gpa_is_its_papers_three_sequences():
    """Equations of the paper's section 3, with x, y and z all in memory."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = GPA([p], lr=0.1, weight_decay=0.01, mu_x=0.9, mu_y=0.7)
    x = z = torch.ones(5, dtype=torch.float64)
    m, v = torch.zeros(5), torch.zeros(5)
    for t in range(1, 30):
        optimizer.train()
        torch.testing.assert_close(p.detach(), 0.7 * x + 0.3 * z)
        g = torch.randn(5, generator=generator, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        z = z - 0.1 * ((m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 0.01 * z)
        x = 0.9 * x + 0.1 * z
        optimizer.eval()
        torch.testing.assert_close(p.detach(), x)


@pytest.mark.parametrize(
    ("around", "settings"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1), {"weight_decay": 0.1}),
        (lambda model: Muon(groups(model), lr=0.02, betas=(0.9, 0.999), weight_decay=0.1), {"weight_decay": 0.1}),
        (
            lambda model: cprop.CProp(Muon(groups(model), lr=0.02, betas=(0.9, 0.999)), eps=PAPERS_EPS),
            {"c": 1.0},
        ),
    ],
    ids=["AdamW", "Muon", "CProp around Muon"],
)
def test_gpa_without_an_average_is_the_optimizer_inside(around, settings):
    ours, theirs = two_layers(), two_layers()
    optimizer = around(theirs)
    expected = trained(theirs, optimizer)
    params = ours.parameters() if isinstance(optimizer, torch.optim.AdamW) else groups(ours)
    found = trained(ours, GPA(params, lr=0.02, mu_x=0.0, **settings))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("optimizer", [GPA, ScheduleFreeCProp])
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


def test_a_window_of_all_steps_is_a_plain_mean():
    p = nn.Parameter(torch.zeros(3))
    optimizer = GPA([p], lr=0.1, window=1.0)
    zs = []
    for _ in range(10):
        optimizer.train()
        p.grad = torch.randn(3)
        optimizer.step()
        zs.append(optimizer.state[p]["z"].clone())
    optimizer.eval()
    torch.testing.assert_close(p.detach(), torch.stack(zs).mean(0))


def build(optimizer, model, iterations=100, warmup=0, **settings):
    run = Specification("fmnist-fc", optimizer, lr=0.1, iterations=iterations, settings=settings)
    return optimizers.build(run, model, warmup)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "adabound"])
def test_every_peer_lowers_a_loss(name):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    optimizer, _ = build(name, model, **({"fused": False} if "fused" in RECIPES[name].settings else {}))
    for group in optimizer.param_groups:
        group["lr"] = RECIPES[name].guess
    getattr(optimizer, "train", lambda: None)()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_ademamix_is_told_the_runs_length():
    optimizer, scheduler = build("ademamix", nn.Linear(2, 2), iterations=70)
    assert optimizer.param_groups[0]["t_alpha_beta3"] == 70
    assert optimizer.param_groups[0]["weight_decouple"]
    assert scheduler is None


def test_schedule_free_warms_up_by_itself_and_the_others_by_a_scheduler():
    optimizer, scheduler = build("schedule-free-adamw", nn.Linear(2, 2), warmup=5)
    assert scheduler is None
    assert optimizer.param_groups[0]["warmup_steps"] == 5
    optimizer, scheduler = build("muon", fully_connected(), warmup=4)
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [[pytest.approx(0.1 * f)] * 2 for f in (0.25, 0.5, 0.75, 1, 1, 1)]


def test_cosine_decay_is_torchs():
    optimizer, scheduler = build("adam+cosine", nn.Linear(2, 2), fused=False)
    theirs = copy.deepcopy(optimizer)
    expected = CosineAnnealingLR(theirs, 100)
    for _ in range(100):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        for one, its in ((optimizer, scheduler), (theirs, expected)):
            one.step()
            its.step()


def test_averaged_weights_grow_with_time():
    """Weights in proportion to t(t+1)...(t+7): the window is a ninth of the run, however long it is."""
    model = nn.Linear(1, 1, bias=False)
    averaged = optimizers.average(Specification("fmnist-fc", "adam+average", lr=1.0), model)
    for t in range(1, 201):
        model.weight.data.fill_(float(t))
        averaged.update_parameters(model)
    weights = [math.prod(range(t, t + 8)) for t in range(1, 201)]
    mean = sum(t * w for t, w in zip(range(1, 201), weights, strict=True)) / sum(weights)
    assert averaged.module.weight.item() == pytest.approx(mean, rel=1e-5)
    assert 0.88 < mean / 200 < 0.91
