"""The registered experiments: ``cprop-lab run EXPERIMENT --with studies.experiments``."""

from cprop_lab import Variant, register_experiment
from cprop_lab.experiments.presets import Length
from studies.registered import Registered

DENOISER = "studies.denoising:FashionDenoiser"
MOMENTA = dict.fromkeys(("adamw", "nadamw", "schedule-free-adamw"), ("beta1", (0.9, 0.95, 0.98)))

# At the cost of an AdamW step. All rows know the same of the data; those with cosine decay also know the run's end.
ROWS = (
    *("adamw+cosine", "adamw+average", "adamw+rsqrt+average", "nadamw+cosine", "schedule-free-adamw"),
    *("cprop-adamw+average", "cprop-adamw+rsqrt+average", "cprop-adamw+cosine"),
)

for iterations in (4_000, 16_000):
    register_experiment(
        Registered(
            f"denoising-{iterations}",
            f"Denoising diffusion on Fashion-MNIST, batches of 16, {iterations:,} steps",
            "beyond the paper",
            "Registered: AdamW with CProp and averaged weights, which does not know when the run ends, is ahead in "
            "held-out loss of every tuned rival at the cost of an AdamW step.",
            [Variant(DENOISER, optimizer, 16, own_rate=True) for optimizer in ROWS],
            kind="rates",
            panels=("test_loss",),
            length=Length(iterations, 10, 10_000),
            momenta=MOMENTA,
        )
    )
