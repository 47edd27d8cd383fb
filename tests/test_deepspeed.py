"""DeepSpeed's ZeRO, stages 1 to 3: the parameters of one process."""

import os
import sys

import pytest
import torch
from processes import torchrun
from test_distributed import NAMES, STEPS, batch, build, loss, network, one_process

pytestmark = pytest.mark.slow

FEW = ("CPropAdam", "CProp-AdamW-weight_decay=0.1")
STAGES = {1: FEW, 2: FEW, 3: FEW}
ALL = {3: NAMES}  # where the parameters are sharded too


def train(stage, names, folder):
    """One rank's part: ZeRO gives the optimizer flat shards, which is all that its stages have in common."""
    import deepspeed

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name in names:
        model = network()
        config = {
            "train_batch_size": 8,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1e9,  # by default DeepSpeed clips the norm to one, and the reference does not
        }
        optimizer = build(name, "for-loop", model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(STEPS):
            inputs, targets = batch(step)
            engine.backward(loss(engine, inputs[rank::world], targets[rank::world]))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            if rank == 0:
                torch.save([p.detach().clone() for p in model.parameters()], f"{folder}/{stage}-{NAMES.index(name)}.pt")


@pytest.mark.parametrize("stages", [STAGES, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_zero_is_one_process(stages, tmp_path):
    pytest.importorskip("deepspeed", exc_type=ImportError)
    own = ["all"] if stages is ALL else []
    torchrun(__file__, tmp_path, *own, DS_ACCELERATOR="cpu", PYTHONPATH=os.pathsep.join(sys.path))
    reference = {name: one_process(name, "for-loop", 2) for names in stages.values() for name in names}
    for stage, names in stages.items():
        for name in names:
            where = f"{name}, stage {stage}"
            saved = torch.load(tmp_path / f"{stage}-{NAMES.index(name)}.pt")
            for ours, theirs in zip(saved, reference[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0, msg=lambda m, where=where: f"{where}: {m}")


if __name__ == "__main__":
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    for stage, names in (ALL if sys.argv[2:] else STAGES).items():  # in one start, which takes longer than they do
        train(stage, names, sys.argv[1])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Not through the interpreter's end: now and then a thread of gloo's or DeepSpeed's outlives it there, and aborts
    # ("terminate called without an active exception"). What is tested is on disk.
    sys.stdout.flush()
    os._exit(0)
