"""State in eight bits, block-wise quantised by torchao: made, recognised, and taken apart for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cprop.sharding import local

__all__ = ["BLOCK", "assemble", "example", "fits", "is_quantised", "parts", "zeros"]

BLOCK: Final = 256
"""Elements that share a scale, as in torchao's own optimizers."""


def fits(p: Tensor) -> bool:
    """Whether a parameter is worth quantising, and can be: in whole blocks on every rank."""
    shard = local(p)
    return shard.numel() >= 4096 and shard.numel() % BLOCK == 0 and shard.is_contiguous() and not shard.is_complex()


def zeros(p: Tensor, signed: bool) -> Tensor:
    """Zero state for a parameter, sharded like it."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("cprop_state_dtype='8bit' needs torchao: pip install 'cprop[lean]'") from error
    shard = local(p)
    state: Tensor = OptimState8bit.zeros(shard.shape, signed, BLOCK, shard.device, torch.float32)
    if shard is p:
        return state
    from torch.distributed.tensor import DTensor

    whole: Any = p
    return DTensor.from_local(
        state, whole.device_mesh, whole.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is torchao's, without asking torchao."""
    return type(tensor).__name__ == "OptimState8bit"


SEPARATOR: Final = "/"
"""What stands between the name of a quantised tensor, its kind, and the name of a part of it."""


def parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Tensors of which some are quantised, those in parts and the others in rows of one block.

    ``None`` if one of the others is laid out in another order.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shard: Any = local(tensor)
        if is_quantised(shard):
            prefix = SEPARATOR.join((name, "signed" if shard.signed else "unsigned", ""))
            views[f"{prefix}codes"] = shard.codes.view(-1, BLOCK)
            views |= {f"{prefix}scale": shard.scale, f"{prefix}qmap": shard.qmap}
        elif shard.is_contiguous():
            views[name] = shard.view(-1, BLOCK)
        else:
            return None
    return views


def assemble(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that :func:`parts` took apart, and others as they are."""
    tensors: dict[str, Tensor] = {}
    for key, view in views.items():
        name, _, rest = key.partition(SEPARATOR)
        if not rest:
            tensors[name] = view
        elif rest.endswith("codes"):
            from torchao.optim.subclass_8bit import OptimState8bit

            prefix = key.removesuffix("codes")
            pieces = (view, views[f"{prefix}scale"], views[f"{prefix}qmap"])
            tensors[name] = OptimState8bit(*pieces, rest.startswith("signed"), dtype=torch.float32)
    return tensors


def example(name: str, names: tuple[str, ...], length: int) -> tuple[int, ...]:
    """The shape of an example for one of several inputs of a kernel, from :func:`parts` or plain vectors."""
    if not any(SEPARATOR in other for other in names):
        return (length,)
    part = name.rpartition(SEPARATOR)[2] if SEPARATOR in name else ""
    return {"scale": (length // BLOCK,), "qmap": (256,)}.get(part, (length // BLOCK, BLOCK))
