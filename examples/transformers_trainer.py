"""Transformers' Trainer with CProp: both ways of passing an optimizer, and resumption from a checkpoint.

    python examples/transformers_trainer.py runs/transformers --steps 20      # stop early
    python examples/transformers_trainer.py runs/transformers                 # and resume

The model is a tiny GPT-2 trained from scratch, and the text is the source code of Python's standard library, byte by
byte, so there is nothing to download.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import cprop
from cprop.integrations.transformers import MonitorCallback

CONTEXT, BATCH = 32, 8


def text() -> TensorDataset:
    """Windows of bytes."""
    source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    bytes_ = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8).long()
    return TensorDataset(bytes_[: len(bytes_) // CONTEXT * CONTEXT].view(-1, CONTEXT))


def collate(windows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch in the form the model expects."""
    tokens = torch.stack([window for (window,) in windows])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train, or resume."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for checkpoints; training resumes from the last one")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--by-class", action="store_true", help="pass a class and its arguments, not an optimizer")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4))
    how = (
        {"optimizer_cls_and_kwargs": (cprop.CProp.around(torch.optim.AdamW), {"lr": 3e-3})}
        if options.by_class
        else {"optimizers": (cprop.CProp(torch.optim.AdamW(model.parameters(), lr=3e-3)), None)}
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(options.folder),
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            save_steps=20,
            logging_steps=10,
            lr_scheduler_type="constant",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=text(),
        data_collator=collate,
        callbacks=[MonitorCallback(every=10, batch_size=BATCH)],
        **how,
    )
    last = get_last_checkpoint(str(options.folder)) if options.folder.is_dir() else None
    print(f"resuming from {last}" if last else "starting at step 0", flush=True)
    trainer.train(resume_from_checkpoint=last)
    looks = [entry["cprop/mean_scale"] for entry in trainer.state.log_history if "cprop/mean_scale" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(
        f"from {Path(last).name if last else 'the start'} to step {trainer.state.global_step}: loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}, mean scale {looks[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
