"""Language modelling: Penn Treebank, word by word, as in the paper's appendix C."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cprop_lab.models import AWDLSTM, Dropouts
from cprop_lab.models.awd_lstm import regularisation
from cprop_lab.workloads import data
from cprop_lab.workloads.task import Task

__all__ = ["PennTreebank", "Windows"]

CLIP = 0.25


class Windows:
    """A text cut into as many rows as a batch has, and along time into windows of equal length.

    The targets are the words one place on. What is left over at the end of the rows is dropped, and the last window may
    be shorter than the others.

    Example:
        >>> windows = Windows(torch.arange(11), batch_size=2, length=3)
        >>> [window[0].T.tolist() for window in map(windows.__getitem__, range(len(windows)))]
        [[[0, 1, 2], [5, 6, 7]], [[3], [8]]]
        >>> windows[0][1].T.tolist()
        [[1, 2, 3], [6, 7, 8]]
    """

    def __init__(self, tokens: Tensor, batch_size: int, length: int) -> None:
        rows = len(tokens) // batch_size
        self.tokens = tokens[: rows * batch_size].view(batch_size, rows).T.contiguous()
        self.length = length

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        start = window * self.length
        stop = min(start + self.length, len(self.tokens) - 1)
        return self.tokens[start:stop], self.tokens[start + 1 : stop + 1]


@dataclass
class PennTreebank(Task):
    """AWD-LSTM on Penn Treebank: batches follow each other in the text, and the hidden state is carried over.

    The text is cut into as many rows as a batch has.

    Args:
        dropout: the paper's strong dropout, or none.
        length: of truncated backpropagation.
    """

    dropout: bool = False
    length: int = 35

    metric: ClassVar[str] = "perplexity"

    def data(self) -> tuple[Any, Any]:
        """Windows of the training and of the test text; the validation text is not used."""
        training, test = (
            Windows(data.text(data.PENN_TREEBANK, split)[0], self.batch_size, self.length) for split in (True, False)
        )
        return training, test

    def model(self) -> nn.Module:
        """A new AWD-LSTM, of the vocabulary's size."""
        words = len(data.vocabulary(data.PENN_TREEBANK))
        model = AWDLSTM(words, dropout=Dropouts() if self.dropout else Dropouts.none())
        model.reset(self.batch_size)
        return model

    def order(self, size: int, generator: torch.Generator) -> Tensor:
        """The windows, one after the other."""
        return torch.arange(size).unsqueeze(1)

    def take(self, data: Windows, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The window of that number: one is a whole batch."""
        (window,) = indices.tolist()
        return data[window]

    def evaluation_batch_size(self) -> int:
        """One window."""
        return 1

    def before_forward(self, model: nn.Module, step_in_epoch: int) -> None:
        """Forget the text's end at its start."""
        if step_in_epoch == 0:
            model.reset(self.batch_size)  # type: ignore[operator]

    def before_step(self, model: nn.Module) -> None:
        """Clip the norm of the gradient."""
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A hidden state of its own for an evaluation."""
        context: AbstractContextManager[Any] = model.fresh(self.batch_size)  # type: ignore[operator]
        return context

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy with AWD-LSTM's two regularisers."""
        output = model(batch[0])
        return _cross_entropy(output.logits, batch[1]) + regularisation(output)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The cross-entropy alone."""
        return {"loss": _cross_entropy(model(batch[0]).logits, batch[1])}


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
