"""Parameters of which a rank holds only a part."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["local"]

_PLAIN: Final = (Tensor, torch.nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: of a DTensor its shard, and else the tensor itself."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor
