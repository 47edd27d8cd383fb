"""The AlgoPerf submission has AlgoPerf's functions with AlgoPerf's arguments, and trains.

AlgoPerf is installed from its own repository and cannot be had here: its specification's signatures are written down
below, and a stand-in plays the workload and the runner.
"""

import inspect
import io
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

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

    def model_fn(
        self, params, augmented_and_preprocessed_input_batch, model_state, mode, rng, update_batch_norm, dropout_rate
    ):
        assert mode.name == "TRAIN"
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        each = nn.functional.cross_entropy(
            logits_batch.flatten(0, -2), label_batch.flatten(), reduction="none", label_smoothing=label_smoothing
        )
        weights = torch.ones_like(each) if mask_batch is None else mask_batch.flatten()
        return {"summed": (each * weights).sum(), "n_valid_examples": weights.sum(), "per_example": each}


class Run:
    """AlgoPerf's runner: it trains, prepares for evaluation, and makes and reads checkpoints."""

    def __init__(self, submission):
        self.submission, self.workload, self.step = submission, Workload(), 0
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        self.state = submission.init_optimizer_state(self.workload, self.model, None, None, rng=0)

    def train(self, steps):
        for _ in range(steps):
            points = torch.randn(64, 2, generator=torch.Generator().manual_seed(self.step))
            queue = iter([{"inputs": points, "targets": (points.norm(dim=1) < 1.2).long(), "weights": None}])
            batch = self.submission.data_selection(
                self.workload, queue, self.state, self.model, None, None, self.step, 0
            )
            self.state, self.model, _ = self.submission.update_params(
                workload=self.workload,
                current_param_container=self.model,
                current_params_types=None,
                model_state=None,
                hyperparameters=None,
                batch=batch,
                loss_type=None,
                optimizer_state=self.state,
                eval_results=[],
                global_step=self.step,
                rng=0,
                train_state={},
            )
            self.step += 1

    def prepare_for_eval(self):
        self.state, self.model, _ = self.submission.prepare_for_eval(
            workload=self.workload,
            current_param_container=self.model,
            current_params_types=None,
            model_state=None,
            hyperparameters=None,
            loss_type=None,
            optimizer_state=self.state,
            eval_results=[],
            global_step=self.step,
            rng=0,
        )

    def checkpoint(self):
        file = io.BytesIO()
        state = {key: value.state_dict() for key, value in self.state.items()}  # all that AlgoPerf keeps of it
        torch.save((self.model.state_dict(), state, self.step), file)
        file.seek(0)
        return file

    def restore(self, file):
        weights, state, self.step = torch.load(file)
        self.model.load_state_dict(weights)
        for key, value in self.state.items():
            value.load_state_dict(state[key])

    def values(self):
        return [x.detach().clone() for x in self.model.state_dict().values()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_functions_and_their_arguments(submission):
    for name, arguments in SIGNATURES.items():
        assert tuple(inspect.signature(getattr(submission, name)).parameters) == arguments, name


SCORED = (
    *("criteo1tb", "fastmri", "finewebedu_lm", "imagenet_resnet", "imagenet_vit"),
    *("librispeech_conformer", "librispeech_deepspeech", "ogbg", "wmt"),
)


def test_every_workload_has_a_batch_size_that_eight_devices_divide(submission):
    for name in (*SCORED, "mnist"):
        assert submission.get_batch_size(name) % 8 == 0
        assert f"`{name}`" in (FOLDER / "README.md").read_text()
    with pytest.raises(ValueError, match="unknown workload 'wmt_post_ln': choose one of cifar, criteo1tb"):
        submission.get_batch_size("wmt_post_ln")  # AlgoPerf then asks for the workload that this is a variant of


def test_the_folder_is_what_a_submission_consists_of(submission):
    assert {path.name for path in FOLDER.iterdir() if path.name != "__pycache__"} == {
        *("README.md", "__init__.py", "requirements.txt", "submission.py", "submission_info.yml")
    }
    (requirement,) = [x for x in (FOLDER / "requirements.txt").read_text().splitlines() if not x.startswith("#")]
    assert requirement == "cprop"


def test_no_kernel_of_our_own(submission):
    (group,) = Run(submission).state["optimizer"].param_groups
    assert (group["fused"], group["foreach"]) == (False, True)


def test_evaluation_gets_the_averaged_weights_and_training_does_not_see_them(submission):
    undisturbed, evaluated = Run(submission), Run(submission)
    undisturbed.train(20)
    average = None
    for step in range(1, 21):
        evaluated.train(1)
        values = [x.double() for x in evaluated.values()]
        weight = (submission.POWER + 1) / (step + submission.POWER)
        average = values if average is None else [a + weight * (x - a) for a, x in zip(average, values, strict=True)]
        if step in (7, 20):
            before = evaluated.values()
            evaluated.prepare_for_eval()
            evaluated.prepare_for_eval()  # again, if there was no step in between
            for a, b, now in zip(average, evaluated.values(), before, strict=True):
                if b.is_floating_point():
                    torch.testing.assert_close(b.double(), a, atol=1e-5, rtol=1e-4)
                    assert not torch.equal(b, now)
    evaluated.train(1)
    undisturbed.train(1)
    assert same(evaluated.values(), undisturbed.values())


def test_a_checkpoint_of_algoperfs_resumes_to_the_bit(submission):
    whole, stopped, resumed = Run(submission), Run(submission), Run(submission)
    stopped.train(5)
    stopped.prepare_for_eval()
    resumed.restore(stopped.checkpoint())
    assert same(resumed.values(), stopped.values())
    for run, steps in ((whole, 10), (resumed, 5)):
        run.train(steps)
        run.prepare_for_eval()
    assert same(resumed.values(), whole.values())


@pytest.mark.slow
def test_it_trains_on_a_workload_like_algoperfs(submission):
    run = Run(submission)
    run.train(1500)
    run.prepare_for_eval()
    points = torch.randn(2048, 2)
    accuracy = (run.model.eval()(points).argmax(1) == (points.norm(dim=1) < 1.2)).float().mean()
    assert accuracy > 0.95
