"""Lightning with CProp: a run that is stopped and resumed ends with the weights of one that was not, to the bit.

python examples/lightning_resume.py runs/lightning
"""

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cprop
from cprop.integrations.lightning import MonitorCallback


class Classifier(pl.LightningModule):
    """Tells points within a circle from those outside."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch."""
        points, labels = batch
        return nn.functional.cross_entropy(self.network(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """CProp, as one would return Adam."""
        return cprop.CPropAdam(self.parameters(), lr=1e-2)


def fit(folder: Path, epochs: int, resume: Path | None = None) -> Classifier:
    """Train from the start, or go on from a checkpoint."""
    torch.manual_seed(0)
    model = Classifier()
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(1))
    # In order: Lightning does not save where a shuffled loader was.
    loader = DataLoader(TensorDataset(points, (points.norm(dim=1) < 1.2).long()), batch_size=32)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=1,
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder),
        callbacks=[MonitorCallback(every=16, batch_size=32)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"epoch-{epochs}.ckpt")
    return model


def main() -> None:
    """Train once in one go, and once with a stop in the middle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of checkpoints and logs")
    folder = parser.parse_args().folder
    warnings.filterwarnings("ignore", module="lightning")
    whole = fit(folder / "whole", epochs=6)
    fit(folder / "stopped", epochs=3)
    resumed = fit(folder / "stopped", epochs=6, resume=folder / "stopped" / "epoch-3.ckpt")
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"resumed and whole run are the same to the bit: {same}")


if __name__ == "__main__":
    main()
