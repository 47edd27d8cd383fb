"""The AlgoPerf submission has AlgoPerf's functions with AlgoPerf's arguments, and trains.

AlgoPerf is installed from its own repository and cannot be had here: its specification's signatures are written down
below, and a stand-in plays the workload.
"""

import inspect
import json
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[1] / "examples" / "algoperf"

COMMON = ("workload", "current_param_container", "current_params_types", "model_state", "hyperparameters")
SIGNATURES = {
    "get_batch_size": ("workload_name",),
    "init_optimizer_state": ("workload", "model_params", "model_state", "hyperparameters", "rng"),
    "update_params": (
        *COMMON,
        *("batch", "loss_type", "optimizer_state", "eval_results", "global_step", "rng", "train_state"),
    ),
    "prepare_for_eval": (*COMMON, "loss_type", "optimizer_state", "eval_results", "global_step", "rng"),
    "data_selection": (
        *("workload", "input_queue", "optimizer_state", "current_param_container", "model_state"),
        *("hyperparameters", "global_step", "rng"),
    ),
}


@pytest.fixture
def submission(monkeypatch):
    class ForwardPassMode(Enum):
        TRAIN = 0
        EVAL = 1

    spec = ModuleType("algoperf.spec")
    spec.ForwardPassMode = ForwardPassMode
    package = ModuleType("algoperf")
    package.spec = spec
    monkeypatch.setitem(sys.modules, "algoperf", package)
    monkeypatch.setitem(sys.modules, "algoperf.spec", spec)
    monkeypatch.syspath_prepend(FOLDER)
    import submission

    yield submission
    sys.modules.pop("submission")


class Workload:
    """What of a workload a submission calls, in the form that AlgoPerf's PyTorch workloads have."""

    step_hint = None  # a submission that reads it would fail here

    def model_fn(self, params, augmented_and_preprocessed_input_batch, model_state, mode, rng, update_batch_norm):
        assert mode.name == "TRAIN"
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        each = nn.functional.cross_entropy(logits_batch, label_batch, reduction="none", label_smoothing=label_smoothing)
        weights = torch.ones_like(each) if mask_batch is None else mask_batch
        return {"summed": (each * weights).sum(), "n_valid_examples": weights.sum(), "per_example": each}


def test_functions_and_their_arguments(submission):
    for name, arguments in SIGNATURES.items():
        assert tuple(inspect.signature(getattr(submission, name)).parameters) == arguments, name


@pytest.mark.slow
def test_it_trains_on_a_workload_like_algoperfs(submission):
    space = json.loads((FOLDER / "tuning_search_space.json").read_text())
    for name, point in space.items():
        assert set(point) in ({"feasible_points"}, {"min", "max", "scaling"}), name
    chosen = SimpleNamespace(learning_rate=1e-2, one_minus_beta1=0.1, beta2=0.999, weight_decay=5e-3, cprop_c=1.0)
    assert set(vars(chosen)) == set(space)

    torch.manual_seed(0)
    workload, model = Workload(), nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def queue():
        while True:
            points = torch.randn(submission.get_batch_size("mnist"), 2)
            yield {"inputs": points, "targets": (points.norm(dim=1) < 1.2).long(), "weights": torch.ones(len(points))}

    batches = queue()
    state = submission.init_optimizer_state(workload, model, None, chosen, rng=0)
    for step in range(800):
        batch = submission.data_selection(workload, batches, state, model, None, chosen, step, rng=0)
        state, model, _ = submission.update_params(workload, model, None, None, chosen, batch, None, state, [], step, 0)
    state, model, _ = submission.prepare_for_eval(workload, model, None, None, chosen, None, state, [], 800, 0)
    points = torch.randn(2048, 2)
    assert (model(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean() > 0.95
    with pytest.raises(ValueError, match="unknown workload 'none': choose one of cifar, criteo1tb"):
        submission.get_batch_size("none")
