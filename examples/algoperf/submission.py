"""CProp as a submission to AlgoPerf's self-tuning ruleset: AdamW + CProp, one setting for all workloads.

AlgoPerf's other submissions decay their learning rate over a number of steps that is known beforehand. CProp needs no
such number: ``workload.step_hint`` is not read. The weights that are evaluated are averages whose window grows with the
run. ``README.md`` says how to run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import cprop

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
WARMUP_STEPS = 500
CLIP = 1.0
DROPOUT = 0.1
LABEL_SMOOTHING = 0.1
POWER = 8
"""The average gives the n-th step the weight n**POWER, nearly: about the last ninth of the steps count."""

BATCH_SIZES = {
    "cifar": 128,
    "criteo1tb": 262_144,
    "fastmri": 32,
    "finewebedu_lm": 64,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}


class AveragedWeights:
    r"""An average of the weights, and the weights in training while the model holds the average.

    .. math::
        \bar\theta_t = \bar\theta_{t-1} + \frac{p + 1}{t + p} (\theta_t - \bar\theta_{t-1})

    Running statistics of batch norm are averaged too. AlgoPerf saves and restores what has a ``state_dict``.

    References:
        Shamir and Zhang, *Stochastic Gradient Descent for Non-smooth Optimization*, 2013, section 4.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self.average = [x.detach().clone() for x in averaged(model)]
        self.training: list[Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        torch._foreach_lerp_(self.average, averaged(model), (POWER + 1) / (self.steps + POWER))

    @torch.no_grad()
    def put_in(self, model: nn.Module) -> None:
        """Give the model the average, and keep the weights in training."""
        if not self.training:
            self.training = [x.detach().clone() for x in averaged(model)]
            torch._foreach_copy_(averaged(model), self.average)

    @torch.no_grad()
    def take_out(self, model: nn.Module) -> None:
        """Give the model the weights in training again."""
        if self.training:
            torch._foreach_copy_(averaged(model), self.training)
            self.training = []

    def state_dict(self) -> dict[str, Any]:
        """For AlgoPerf's checkpoints, which are made while the model holds the average."""
        return {"steps": self.steps, "average": self.average, "training": self.training}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.steps = state["steps"]
        self.average, self.training = ([x.clone() for x in state[key]] for key in ("average", "training"))


def averaged(model: nn.Module) -> list[Tensor]:
    """The parameters, and the running statistics."""
    return [*model.parameters(), *(x for x in model.buffers() if x.is_floating_point())]


def get_batch_size(workload_name: str) -> int:
    """The batch size over all devices."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"unknown workload {workload_name!r}: choose one of {', '.join(BATCH_SIZES)}")
    return BATCH_SIZES[workload_name]


def init_optimizer_state(
    workload: Any, model_params: nn.Module, model_state: Any, hyperparameters: Any, rng: Any
) -> dict[str, Any]:
    """The optimizer, its warm-up, and the averaged weights. Under the self-tuning ruleset, hyperparameters are None."""
    del workload, model_state, hyperparameters, rng
    # No compiled kernels: the rules exclude faster ones than torch's.
    optimizer = cprop.CPropAdamW(
        model_params.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True, fused=False
    )
    return {
        "optimizer": optimizer,
        "scheduler": LinearLR(optimizer, 0.01, total_iters=WARMUP_STEPS),
        "average": AveragedWeights(model_params),
    }


def update_params(
    workload: Any,
    current_param_container: nn.Module,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: dict[str, Tensor],
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
    train_state: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], nn.Module, Any]:
    """One step."""
    del current_params_types, hyperparameters, loss_type, eval_results, global_step, train_state
    from algoperf import spec

    model = current_param_container
    optimizer_state["average"].take_out(model)
    model.train()
    optimizer_state["optimizer"].zero_grad()
    logits, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        dropout_rate=DROPOUT,
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=logits,
        mask_batch=batch.get("weights"),
        label_smoothing=LABEL_SMOOTHING,
    )
    summed, valid = losses["summed"], torch.as_tensor(losses["n_valid_examples"], dtype=torch.float32)
    if dist.is_initialized():
        # DDP averages gradients over ranks; the loss is to be averaged over examples, which ranks may have unequally.
        valid = valid.to(summed.device)
        dist.all_reduce(valid)
        summed = summed * dist.get_world_size()
    (summed / valid).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer_state["optimizer"].step()
    optimizer_state["scheduler"].step()
    optimizer_state["average"].update(model)
    return optimizer_state, model, model_state


def prepare_for_eval(
    workload: Any,
    current_param_container: nn.Module,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
) -> tuple[dict[str, Any], nn.Module, Any]:
    """Evaluate the averaged weights. The next step takes them out again."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    optimizer_state["average"].put_in(current_param_container)
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload: Any,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: dict[str, Any],
    current_param_container: nn.Module,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> dict[str, Tensor]:
    """The next batch, as it comes."""
    del workload, optimizer_state, current_param_container, model_state, hyperparameters, global_step, rng
    return next(input_queue)
