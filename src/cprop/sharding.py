"""Parameters of which a rank holds only a part."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["PLAIN", "local"]

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that lie on this rank as a whole."""


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: of a DTensor its shard, and else the tensor itself."""
    if type(tensor) not in PLAIN and hasattr(tensor, "to_local"):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor
