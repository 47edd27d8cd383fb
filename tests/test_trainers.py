"""CProp in the words of other people's trainers. What needs an environment of its own is skipped where it is missing.

More of them, in whole runs: see the examples and the tests of DeepSpeed.
"""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from processes import torchrun
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cprop

OWN_ENVIRONMENT = "is not installed: it has an environment of its own, see docs/trainers.md"


# --- timm -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm():
    """The real timm. It imports torchvision, of which only a build for this torch has compiled operators.

    Where they do not load, two are declared without an implementation, which is what torchvision's import needs.
    Neither timm's optimizers nor its models call them.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip(f"timm {OWN_ENVIRONMENT}")
    library = torch.library.Library("torchvision", "FRAGMENT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm
        import timm.optim
        import timm.scheduler
    yield timm
    del library


@pytest.mark.parametrize("name", ["CPropAdaBound", "CPropAdam", "CPropAdamW", "CPropRMSprop", "CPropSGD"])
def test_timm_builds_every_native_optimizer_by_name(timm, name):
    import cprop.integrations.timm  # registers them

    assert name.lower() in timm.optim.list_optimizers("cprop*")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=2)
    optimizer = timm.optim.create_optimizer_v2(
        model, opt=name.lower(), lr=1e-4, weight_decay=0.05, layer_decay=0.8, cprop_c=2.0
    )
    assert type(optimizer) is getattr(cprop, name)
    groups = optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.05}
    assert len({group["lr_scale"] for group in groups}) > 2  # timm's own, which a step leaves alone
    assert all(group["cprop_c"] == 2.0 for group in groups)
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in groups if name == "CPropSGD")
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=0)
    inputs, labels = torch.randn(4, 3, 160, 160), torch.tensor([0, 1, 0, 1])
    losses = []
    for epoch in range(2):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(epoch + 1)
    assert all(state["cprop_step"] == 2 for state in optimizer.state.values())
    assert {"lr_scale", "cprop_c"} <= optimizer.state_dict()["param_groups"][0].keys()
    assert losses[1] < losses[0]


# --- torchtitan -----------------------------------------------------------------------------------


def test_torchtitans_container_builds_ours_by_name_and_resumes_to_the_bit():
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip(f"torchtitan {OWN_ENVIRONMENT}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.components.optimizer import ParamGroupConfig

        from cprop.integrations.torchtitan import CPropOptimizersContainer

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
        native = {"lr": 1e-2, "betas": (0.9, 0.95), "cprop_c": 2.0}
        config = CPropOptimizersContainer.Config(
            implementation="foreach",
            param_groups=[
                ParamGroupConfig(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
                ParamGroupConfig(
                    pattern="^1", optimizer_name="CProp(AdamW)", optimizer_kwargs={"lr": 1e-2, "cprop_c": 3.0}
                ),
                ParamGroupConfig(pattern=".*", optimizer_name="CPropAdamW", optimizer_kwargs=native),
            ],
        )
        return model, config.build(model_parts=[model])

    def train(model, container, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            container.zero_grad()
            model(torch.randn(8, 3, generator=generator)).square().mean().backward()
            container.step()

    model, container = build()
    assert type(container) is CPropOptimizersContainer
    assert [type(optimizer) for optimizer in container] == [torch.optim.AdamW, cprop.CProp, cprop.CPropAdamW]
    assert [optimizer.param_groups[0].get("cprop_c") for optimizer in container] == [None, 3.0, 2.0]
    train(model, container, range(3))
    saved = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in container.state_dict().items()}
    assert "state.0.weight.cprop_m" in saved
    resumed_model, resumed = build()
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    train(model, container, range(3, 6))
    train(resumed_model, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True))
    with pytest.raises(NotImplementedError, match="Muonium"):
        CPropOptimizersContainer._resolve_optimizer_factory("CProp(Muonium)")


# --- Lightning's command line ---------------------------------------------------------------------


@pytest.mark.slow
def test_lightnings_command_line_takes_the_class_by_its_path(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch):
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(2, (32,))), batch_size=8)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **dict.fromkeys(quiet, False)}
    (tmp_path / "my_optimizers.py").write_text(
        "import cprop, torch\nCPropNAdam = cprop.CProp.around(torch.optim.NAdam)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wrapped = cprop.CProp.around(torch.optim.NAdam)
    for path, cls in (("cprop.CPropAdamW", cprop.CPropAdamW), ("my_optimizers.CPropNAdam", wrapped)):
        words = ["fit", f"--optimizer={path}", "--optimizer.lr=0.01", "--optimizer.cprop_c=2.0"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cli = LightningCLI(Model, trainer_defaults=trainer, args=words, save_config_callback=None)
        (optimizer,) = cli.trainer.optimizers
        assert type(optimizer) is cls
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cprop_c"]) == (0.01, 2.0)
        assert optimizer.state[cli.model.layer.weight]["cprop_step"] == 4


# --- Transformers under FSDP ----------------------------------------------------------------------


def train_under_fsdp(folder):
    """One rank's part.

    Accelerate turns FSDP on for accelerators only. Its state is told that it is on for this CPU too; all that follows
    from that, in Transformers, Accelerate and torch, is their own.
    """
    from accelerate.state import AcceleratorState, DistributedType
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sys.path.insert(0, "examples")
    from transformers_trainer import CONTEXT, collate, text

    initialize = AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_fsdp

    def trainer(how):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4)
        model = GPT2LMHeadModel(config)
        arguments = TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=4,
            save_strategy="no",
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        )
        return Trainer(model=model, args=arguments, train_dataset=text(), data_collator=collate, **how(model))

    with pytest.raises(RuntimeError, match="Passing `optimizers` is not allowed if PyTorch FSDP is enabled"):
        trainer(lambda model: {"optimizers": (cprop.CPropAdamW(model.parameters()), None)})
    for cls in (cprop.CPropAdamW, cprop.CProp.around(torch.optim.AdamW)):
        run = trainer(lambda _, cls=cls: {"optimizer_cls_and_kwargs": (cls, {"lr": 3e-3, "cprop_c": 2.0})})
        run.train()
        optimizer = run.optimizer.optimizer
        assert type(optimizer) is cls
        assert optimizer.param_groups[0]["cprop_c"] == 2.0
        for p, state in optimizer.state.items():
            assert state["cprop_step"] == 5
            assert type(p).__name__ == type(state["cprop_m"]).__name__ == "DTensor"
            assert state["cprop_m"].to_local().shape == p.to_local().shape != p.shape
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        if os.environ["RANK"] == "0":
            print(f"{cls.__name__}: falls {losses[-1] < losses[0] - 0.2}")


@pytest.mark.slow
def test_transformers_takes_the_class_under_fsdp_where_it_refuses_an_optimizer(tmp_path):
    pytest.importorskip("transformers")
    printed = torchrun(Path(__file__), tmp_path, DS_ACCELERATOR="cpu", PYTHONPATH=os.pathsep.join(sys.path))
    for name in ("CPropAdamW", "CPropAroundAdamW"):
        assert printed.count(f"{name}: falls True") == 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    train_under_fsdp(sys.argv[1])
