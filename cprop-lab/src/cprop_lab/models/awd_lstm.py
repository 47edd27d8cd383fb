"""The AWD-LSTM language model for Penn treebank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cprop_lab.models.lstm import LSTM

__all__ = ["AWDLSTM", "Dropouts", "Output", "regularisation"]

EMBEDDING_RANGE: Final = 0.1
"""Of the initial embedding, uniform within plus or minus this: AWD-LSTM's."""

RECURRENT: Final = "weight_hh_l0"
"""torch's name for the hidden-to-hidden matrices of a one-layer LSTM."""


@dataclass(frozen=True)
class Dropouts:
    """How likely each part of the model is dropped; the defaults are the paper's (appendix, "AWD-LSTM w. dropout").

    Example:
        >>> Dropouts(input=0.5)
        Dropouts(embedding=0.1, input=0.5, layer=0.25, output=0.4, weight=0.5)
    """

    embedding: float = 0.1
    """A word, everywhere in the window."""
    input: float = 0.4
    """A feature of the embedding, at all time steps."""
    layer: float = 0.25
    """A unit between two LSTM layers, at all time steps."""
    output: float = 0.4
    """A unit of the last LSTM layer, at all time steps."""
    weight: float = 0.5
    """An element of the hidden-to-hidden matrices."""

    @classmethod
    def none(cls) -> Dropouts:
        """The paper's "AWD-LSTM wo. dropout"."""
        return cls(embedding=0.0, input=0.0, layer=0.0, output=0.0, weight=0.0)


PAPERS_DROPOUTS: Final = Dropouts()


class State(NamedTuple):
    """What one LSTM layer hands to its next time step."""

    hidden: Tensor
    cell: Tensor


class Output(NamedTuple):
    """What :class:`AWDLSTM` computes for a window, each ``[time, batch, ...]``."""

    logits: Tensor
    dropped: Tensor
    """The last layer's output after dropout, which activation regularisation keeps small."""
    raw: Tensor
    """The last layer's output before dropout, which temporal activation regularisation keeps slow."""


def variational_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of ``x[time, batch, feature]`` with one mask for all time steps."""
    if not training or p == 0:
        return x
    return x * F.dropout(x.new_ones(1, *x.shape[1:]), p)


def weight_dropped(lstm: nn.Module, x: Tensor, state: State, p: float) -> tuple[Tensor, State]:
    """Run an LSTM with DropConnect on its hidden-to-hidden matrices: one mask for all time steps."""
    # The dropped weight is handed to the call, so that the raw one stays the parameter that is trained.
    dropped = {RECURRENT: F.dropout(lstm.get_parameter(RECURRENT), p, lstm.training)}
    y, last = functional_call(lstm, dropped, (x, tuple(state)))
    return y, State(*last)


class AWDLSTM(nn.Module):
    """A word-level language model of LSTM layers, regularised by dropout throughout (Merity et al., 2017).

    The embedding is the output layer's weight too (paper section 3.4). The LSTMs' state is carried,
    without its gradient, from one window to the next; it is saved and restored with the weights, so
    that a resumed run goes on where it was. A new model's state is empty: it starts from zeros, at the
    batch size it first sees.

    Args:
        words: size of the vocabulary.
        embedding: size of the embedding, and of the last LSTM layer.
        units: size of the other LSTM layers.
        layers: number of LSTM layers.
        dropout: what is dropped in training.

    Example:
        >>> import torch
        >>> model = AWDLSTM(words=50, embedding=8, units=16)
        >>> tokens = torch.zeros(35, 4, dtype=torch.long)
        >>> output = model(tokens)
        >>> output.logits.shape
        torch.Size([35, 4, 50])
        >>> loss = output.logits.logsumexp(-1).mean() + regularisation(output)
        >>> loss.backward()
        >>> with model.fresh(batch=2):
        ...     evaluated = model.eval()(tokens[:, :2])
    """

    def __init__(
        self,
        words: int = 10_000,
        embedding: int = 400,
        units: int = 1150,
        layers: int = 3,
        dropout: Dropouts = PAPERS_DROPOUTS,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(words, embedding)
        nn.init.uniform_(self.embedding.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        # The paper says "400, 1150, 400 units" for three layers: AWD-LSTM's are 400 to 1150 to 1150 to 400.
        self.sizes = (*[units] * (layers - 1), embedding)
        # One LSTM a layer: torch's LSTM of many layers has no variational dropout between them.
        self.lstms = nn.ModuleList(LSTM(inputs, outputs) for inputs, outputs in pairwise((embedding, *self.sizes)))
        self.output_bias = nn.Parameter(torch.zeros(words))
        for name, size in self._state_sizes().items():
            self.register_buffer(name, self._zeros(0, size))

    def forward(self, tokens: Tensor) -> Output:
        """Predict the word after each of ``tokens[time, batch]``, from the carried state on."""
        p = self.dropout
        batch = tokens.shape[1]
        carried = self.carry()
        if (before := carried[0].hidden.shape[1]) != batch:
            if before > 0:
                raise ValueError(
                    f"tokens have batch size {batch}, and the carried state has {before}: "
                    f"start anew with reset({batch}), or evaluate within fresh({batch})"
                )
            self.reset(batch)
            carried = self.carry()

        words = self.embedding.weight.new_ones(self.embedding.num_embeddings, 1)
        x = self.embedding(tokens) * F.dropout(words, p.embedding, self.training)[tokens]
        raw, dropped = x, variational_dropout(x, p.input, self.training)
        after = []
        for i, (lstm, state) in enumerate(zip(self.lstms, carried, strict=True), start=1):
            raw, state = weight_dropped(lstm, dropped, state, p.weight)
            after.append(state)
            dropped = variational_dropout(raw, p.layer if i < len(self.lstms) else p.output, self.training)
        self._keep(after)
        return Output(F.linear(dropped, self.embedding.weight, self.output_bias), dropped, raw)

    def carry(self) -> list[State]:
        """The state that the next window starts from, layer by layer."""
        return [State(self.get_buffer(f"hidden_{i}"), self.get_buffer(f"cell_{i}")) for i in range(len(self.sizes))]

    def reset(self, batch: int) -> None:
        """Start from a state of zeros, for windows of this batch size."""
        for name, size in self._state_sizes().items():
            setattr(self, name, self._zeros(batch, size))

    @contextmanager
    def fresh(self, batch: int) -> Iterator[None]:
        """Start from a state of zeros, and put the present one back afterwards."""
        carried = self.carry()
        self.reset(batch)
        try:
            yield
        finally:
            self._keep(carried)

    def _state_sizes(self) -> dict[str, int]:
        return {f"{part}_{i}": size for i, size in enumerate(self.sizes) for part in State._fields}

    def _zeros(self, batch: int, size: int) -> Tensor:
        return self.embedding.weight.new_zeros(1, batch, size)

    def _keep(self, states: Sequence[State]) -> None:
        # The buffers are replaced and never written to: a graph or a state_dict may hold the old ones.
        for i, state in enumerate(states):
            for part, value in state._asdict().items():
                setattr(self, f"{part}_{i}", value.detach())

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        # torch refuses a buffer of another shape; here the batch size is the saved run's to say.
        for name, size in self._state_sizes().items():
            if (saved := state_dict.get(prefix + name)) is not None and saved.ndim == 3:
                setattr(self, name, self._zeros(saved.shape[1], size))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def regularisation(output: Output, alpha: float = 2.0, beta: float = 1.0) -> Tensor:
    r"""Activation and temporal activation regularisation (Merity et al., 2017), with the paper's weights.

    .. math::
        \alpha\, \overline{h_{\text{dropped}}^2} + \beta\, \overline{(h_{t+1} - h_t)^2}

    Args:
        output: what :class:`AWDLSTM` gave.
        alpha: weight of the activations' mean square.
        beta: weight of the mean square of their change from step to step; a window of one step has none.

    Example:
        >>> import torch
        >>> h = torch.tensor([1.0, 3.0]).view(2, 1, 1)
        >>> regularisation(Output(logits=h, dropped=h, raw=h))
        tensor(14.)
    """
    total = alpha * output.dropped.square().mean()
    if len(output.raw) > 1:
        total = total + beta * output.raw.diff(dim=0).square().mean()
    return total
