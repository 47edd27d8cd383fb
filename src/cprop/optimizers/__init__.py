"""The wrapper and the native optimizers."""

from cprop.optimizers.adabound import CPropAdaBound
from cprop.optimizers.adam import CPropAdam, CPropAdamW
from cprop.optimizers.rmsprop import CPropRMSprop
from cprop.optimizers.sgd import CPropSGD
from cprop.optimizers.wrapper import CProp

__all__ = ["CProp", "CPropAdaBound", "CPropAdam", "CPropAdamW", "CPropRMSprop", "CPropSGD"]
