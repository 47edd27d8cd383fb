"""Sharded parameters: the local part of a tensor."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["PLAIN", "local"]

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})
"""Tensor types that are never sharded."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, or else the tensor itself."""
    if type(tensor) not in PLAIN and hasattr(tensor, "to_local"):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor
