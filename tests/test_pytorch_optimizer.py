"""CProp around every optimizer of pytorch_optimizer: wrapped, trained, saved, resumed to the bit, scheduled.

What cannot be wrapped is refused at once, and stands in docs/migration.md with the reason. For the nightly stage.
"""

import inspect
import io
import re
import warnings
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from torch import nn

import cprop

pytestmark = pytest.mark.nightly

ARGUMENTS = {  # what a constructor wants beyond parameters and a learning rate
    "alig": {"max_lr": 0.1},
    "bsam": {"num_data": 100},
    "ranger21": {"num_iterations": 100},
}
REFUSED = {  # by CProp, when it is wrapped
    "lbfgs": "evaluates its closure many times",
    "magma": "instead of 'state' and 'param_groups'",
    "schedulefreeadamw": "different weights for training and evaluation",
    "schedulefreeradam": "different weights for training and evaluation",
    "schedulefreesgd": "different weights for training and evaluation",
    "splus": "different weights for training and evaluation",
}
WARNED = {  # of weights in their state
    *("a2grad", "accsgd", "adasmooth", "dadaptadagrad", "dadaptsgd", "focus", "madgrad", "prodigy", "ranger"),
    *("ranger21", "srmm"),
}
ELSEWHERE = {
    "adalomo": "updates parameters during the backward pass, and has no step to scale",
    "lomo": "updates parameters during the backward pass, and has no step to scale",
    "demo": "needs a process group",
    "distributedmuon": "needs a process group",
    "adammini": "partitions a whole model by the names of its layers",
    "muonclip": "needs a transformer's attention layers",
}
CREATE_GRAPH = {"adahessian", "sophiah"}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.vector = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, step):
        noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 + step))
        return (torch.tanh(noise @ self.matrix + self.vector) - noise).square().mean()


def build(name, model):
    cls = pytorch_optimizer.load_optimizer(name)
    known = inspect.signature(cls).parameters
    arguments = {**({"lr": 1e-3} if "lr" in known else {}), **ARGUMENTS.get(name, {})}
    try:
        return cls(model.parameters(), **arguments)
    except (RuntimeError, TypeError, ValueError):  # Muon and its kin want the matrices told apart
        groups = [{"params": [model.matrix], "use_muon": True}, {"params": [model.vector], "use_muon": False}]
        return cls(groups, **arguments)


def train(model, optimizer, start, stop, name):
    for step in range(start, stop):
        torch.manual_seed(1 + step)  # not the seed of the weights, which some draw their state like

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(step)
            loss.backward(create_graph=name in CREATE_GRAPH)
            return loss

        if "closure" in inspect.signature(getattr(optimizer, "inner", optimizer).step).parameters:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        for p in model.parameters():
            p.grad = None


def saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumes_to_the_bit(name, wrap):
    """Ten steps, a checkpoint, ten more: by the same optimizer, and by one that starts from the checkpoint."""
    model, again = Network(), Network()
    optimizer = wrap(build(name, model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5) if "lr" in optimizer.param_groups[0] else None
    for step in range(10):
        train(model, optimizer, step, step + 1, name)
        if scheduler is not None:
            scheduler.step()
    again.load_state_dict(model.state_dict())
    resumed = wrap(build(name, again))
    resumed.load_state_dict(saved(optimizer))
    train(model, optimizer, 10, 20, name)
    train(again, resumed, 10, 20, name)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", pytorch_optimizer.get_supported_optimizers())
def test_around_each_of_them(name):
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    if name in REFUSED:
        with pytest.raises(TypeError, match=re.escape(REFUSED[name])):
            cprop.CProp(build(name, Network()))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            alone = resumes_to_the_bit(name, lambda optimizer: optimizer)
        except Exception as error:
            pytest.skip(f"does not do so without CProp: {type(error).__name__}")
        if not alone:
            pytest.skip("does not resume to the bit without CProp")
        assert resumes_to_the_bit(name, cprop.CProp)
    assert any("keeps weights in its state" in str(w.message) for w in caught) == (name in WARNED)


def test_the_page_names_what_is_refused_and_what_is_warned_of():
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    for name in [*REFUSED, *WARNED]:
        assert f"`{pytorch_optimizer.load_optimizer(name).__name__}`" in page, name
