"""Lightning with CProp: a run that was stopped and resumed ends with bitwise the weights of an uninterrupted one.

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
    """Classifies points: inside or outside a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch."""
        points, labels = batch
        return nn.functional.cross_entropy(self.network(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return CProp as you would return Adam."""
        return cprop.CPropAdam(self.parameters(), lr=1e-2)


def fit(folder: Path, epochs: int, resume: Path | None = None) -> Classifier:
    """Train from the start, or resume from a checkpoint."""
    torch.manual_seed(0)
    model = Classifier()
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(1))
    # Not shuffled: Lightning does not save the position of a shuffled loader.
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
    print(f"resuming from {resume}, to epoch {epochs}" if resume else f"training for {epochs} epochs in {folder}")
    trainer.fit(model, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"epoch-{epochs}.ckpt")
    return model


def main() -> None:
    """Train once without interruption, and once with a stop in the middle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for checkpoints and logs")
    folder = parser.parse_args().folder
    warnings.filterwarnings("ignore", module="lightning")
    whole = fit(folder / "whole", epochs=6)
    fit(folder / "stopped", epochs=3)
    resumed = fit(folder / "stopped", epochs=6, resume=folder / "stopped" / "epoch-3.ckpt")
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"the resumed and the uninterrupted run are bitwise identical: {same}")


if __name__ == "__main__":
    main()
