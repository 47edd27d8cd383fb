"""AWD-LSTM (Merity et al., 2017), with the paper's settings (appendix A.7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, embedding, linear

__all__ = ["AWDLSTM", "Dropouts", "Output", "regularisation"]


@dataclass(frozen=True)
class Dropouts:
    """How much is dropped, and where: the paper's table 1.

    Args:
        embedding: whole words.
        input: of the first layer; one mask for all time steps, as for the next two.
        layer: between layers.
        output: of the last layer.
        weight: of the matrices from hidden to hidden; one mask a forward pass.
    """

    embedding: float = 0.1
    input: float = 0.4
    layer: float = 0.25
    output: float = 0.4
    weight: float = 0.5

    @classmethod
    def none(cls) -> Self:
        """AWD-LSTM without dropout."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0)


class Output(NamedTuple):
    """What the network gives: logits, and the last layer's output after and before dropout, for the regularisers."""

    logits: Tensor
    dropped: Tensor
    raw: Tensor


def variational(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all time steps (Gal and Ghahramani, 2016)."""
    if not training or p == 0:
        return x
    return x * dropout(torch.ones_like(x[:1]), p)


class AWDLSTM(nn.Module):
    """A language model of three LSTM layers, whose output layer is the embedding's transpose.

    The hidden state is carried over from one window of the text to the next, without its gradient. It is a buffer, so
    that a checkpoint holds it.

    Args:
        words: in the vocabulary.
        embedding: its size, and the last layer's.
        units: of the layers before.
        layers: how many.
        dropout: how much, and where.

    Example:
        >>> model = AWDLSTM(words=50, embedding=8, units=16)
        >>> model.reset(batch=4)
        >>> model(torch.zeros(35, 4, dtype=torch.long)).logits.shape
        torch.Size([35, 4, 50])
    """

    def __init__(
        self,
        words: int = 10_000,
        embedding: int = 400,
        units: int = 1150,
        layers: int = 3,
        dropout: Dropouts | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout or Dropouts()
        self.embedding = nn.Parameter(torch.empty(words, embedding).uniform_(-0.1, 0.1))
        sizes = [embedding, *[units] * (layers - 1), embedding]
        self.layers = nn.ModuleList(nn.LSTM(a, b) for a, b in pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(words))
        self.sizes = sizes[1:]
        self.reset(1)

    def reset(self, batch: int) -> None:
        """Forget: a state of zeros, for a batch of this size."""
        for i, size in enumerate(self.sizes):
            for name in ("hidden", "cell"):
                self.register_buffer(f"{name}_{i}", self.embedding.new_zeros(1, batch, size).detach())

    def _carried(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.named_buffers() if name.startswith(("hidden_", "cell_"))}

    @contextmanager
    def fresh(self, batch: int) -> Iterator[None]:
        """Look at another text meanwhile: with a state of zeros, and the own one back afterwards."""
        kept = self._carried()
        self.reset(batch)
        try:
            yield
        finally:
            for name, buffer in kept.items():
                self.register_buffer(name, buffer)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The state carried over has the batch size of the run that was saved, whatever it is here.
        for name in self._carried():
            if prefix + name in state_dict:
                self.register_buffer(name, torch.empty_like(state_dict[prefix + name], device=self.embedding.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, tokens: Tensor) -> Output:
        """Logits of the next word at every place of a window (time, batch)."""
        d = self.dropout
        weight: Tensor = self.embedding
        if self.training and d.embedding:
            weight = weight * dropout(weight.new_ones(len(weight), 1), d.embedding)
        x = variational(embedding(tokens, weight), d.input, self.training)
        raw = x
        for i, layer in enumerate(self.layers):
            raw = self._layer(i, layer, x)
            last = i == len(self.layers) - 1
            x = variational(raw, d.output if last else d.layer, self.training)
        return Output(linear(x, self.embedding, self.bias), x, raw)

    def _layer(self, i: int, layer: Any, x: Tensor) -> Tensor:
        state = (getattr(self, f"hidden_{i}").to(x.dtype), getattr(self, f"cell_{i}").to(x.dtype))
        # DropConnect: the layer is run with another matrix, and its parameter stays what the optimizer sees.
        dropped = dropout(layer.weight_hh_l0, self.dropout.weight, self.training)
        out, (hidden, cell) = functional_call(layer, {"weight_hh_l0": dropped}, (x, state))
        self.register_buffer(f"hidden_{i}", hidden.detach())
        self.register_buffer(f"cell_{i}", cell.detach())
        result: Tensor = out
        return result


def regularisation(output: Output, alpha: float = 2.0, beta: float = 1.0) -> Tensor:
    r"""Activation regularisation and its temporal form.

    .. math::
        \alpha \, \overline{(m \odot h_t)^2} + \beta \, \overline{(h_t - h_{t-1})^2}

    Args:
        output: of the network.
        alpha: of the dropped activations' mean square.
        beta: of the mean square of what they change from one time step to the next; a window of one has no change.
    """
    change = output.raw[1:] - output.raw[:-1]
    temporal = change.pow(2).mean() if len(change) else change.sum()
    return alpha * output.dropped.pow(2).mean() + beta * temporal
