"""The native optimizers under timm's names for optimizers. Importing this module registers them.

::

    import cprop.integrations.timm

    optimizer = timm.optim.create_optimizer_v2(model, opt="cpropadamw", lr=1e-3, weight_decay=0.05, cprop_c=2.0)

A name is the name of the class in lower case. As with timm's own optimizers, ``cpropsgd`` has Nesterov momentum,
``momentum`` is 0.9, and ``alpha`` of ``cproprmsprop`` is 0.9.
"""

from __future__ import annotations

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from cprop.optimizers import CPropAdaBound, CPropAdam, CPropAdamW, CPropRMSprop, CPropSGD

__all__: list[str] = []

for info in (
    OptimInfo("cpropadabound", CPropAdaBound, "AdaBound + CProp", has_betas=True),
    OptimInfo("cpropadam", CPropAdam, "Adam + CProp", has_betas=True),
    OptimInfo("cpropadamw", CPropAdamW, "AdamW + CProp", has_betas=True),
    OptimInfo("cproprmsprop", CPropRMSprop, "RMSprop + CProp", has_momentum=True, defaults={"alpha": 0.9}),
    OptimInfo("cpropsgd", CPropSGD, "SGD + CProp", has_momentum=True, has_eps=False, defaults={"nesterov": True}),
):
    default_registry.register(info)
