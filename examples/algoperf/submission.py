"""CProp as a submission to AlgoPerf: AdamW, its updates scaled by CProp, and no schedule but a warm-up.

    python submission_runner.py --framework=pytorch --workload=mnist --tuning_ruleset=external \
        --submission_path=.../examples/algoperf/submission.py \
        --tuning_search_space=.../examples/algoperf/tuning_search_space.json

AlgoPerf's other submissions decay their learning rate over a number of steps that is known beforehand. CProp needs no
such number: ``workload.step_hint`` is not read.

Checked against AlgoPerf's documented signatures, with a stand-in for its workload. AlgoPerf itself, which is installed
from its own repository, was not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import cprop

WARMUP_STEPS = 500
CLIP = 1.0
BATCH_SIZES = {
    "cifar": 128,
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}


def get_batch_size(workload_name: str) -> int:
    """The batch size over all devices."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"unknown workload {workload_name!r}: choose one of {', '.join(BATCH_SIZES)}")
    return BATCH_SIZES[workload_name]


def init_optimizer_state(
    workload: Any, model_params: nn.Module, model_state: Any, hyperparameters: Any, rng: Any
) -> dict[str, Any]:
    """The optimizer, and its warm-up."""
    del workload, model_state, rng
    optimizer = cprop.CPropAdamW(
        model_params.parameters(),
        lr=hyperparameters.learning_rate,
        betas=(1 - hyperparameters.one_minus_beta1, hyperparameters.beta2),
        weight_decay=hyperparameters.weight_decay,
        cprop_c=hyperparameters.cprop_c,
    )
    return {"optimizer": optimizer, "scheduler": LinearLR(optimizer, 0.01, total_iters=WARMUP_STEPS)}


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
    del current_params_types, loss_type, eval_results, global_step, train_state
    from algoperf import spec

    model = current_param_container
    model.train()
    optimizer_state["optimizer"].zero_grad()
    logits, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=logits,
        mask_batch=batch.get("weights"),
        label_smoothing=getattr(hyperparameters, "label_smoothing", 0.0),
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
    """Nothing: the weights that are trained are the weights that are evaluated."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
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
