"""Language modelling on Penn Treebank: the paper's LSTM (appendix C), and two transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cprop_lab.models import AWDLSTM, GPT, Dropouts, WordTransformer
from cprop_lab.models.awd_lstm import regularisation
from cprop_lab.workloads import data
from cprop_lab.workloads.task import Task

__all__ = ["CharacterGPT", "PennTreebank", "Windows", "WordTransformers"]


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
class Text(Task):
    """Language modelling on Penn Treebank: a batch is a window of a text that is cut into as many rows as a batch has.

    Args:
        length: tokens per window.
    """

    length: int = 35

    metric: ClassVar[str] = "perplexity"
    examples: ClassVar[int] = 20  # windows, each as large as a batch
    clip: ClassVar[float]
    """The largest norm of the gradient."""

    def tokens(self, training: bool) -> Tensor:
        """The training or the test text as a row of numbers; the validation text is not used."""
        return data.text(data.PENN_TREEBANK, training)[0]

    def data(self) -> tuple[Any, Any]:
        """Windows of the training and of the test text."""
        training, test = (Windows(self.tokens(split), self.batch_size, self.length) for split in (True, False))
        return training, test

    def take(self, data: Windows, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The window of that number: one is a whole batch."""
        (window,) = indices.tolist()
        return data[window]

    def evaluation_batch_size(self) -> int:
        """One window."""
        return 1

    def before_step(self, model: nn.Module) -> None:
        """Clip the norm of the gradient."""
        nn.utils.clip_grad_norm_(model.parameters(), self.clip)


@dataclass
class PennTreebank(Text):
    """AWD-LSTM on Penn Treebank: batches follow each other in the text, and the hidden state is carried over.

    Args:
        dropout: the paper's strong dropout, or none.
        embedding: features per word.
        units: of the hidden layers.
    """

    dropout: bool = False
    embedding: int = 400
    units: int = 1150

    clip: ClassVar[float] = 0.25

    def model(self) -> nn.Module:
        """A new AWD-LSTM, of the vocabulary's size."""
        words = len(data.vocabulary(data.PENN_TREEBANK))
        model = AWDLSTM(words, self.embedding, self.units, dropout=Dropouts() if self.dropout else Dropouts.none())
        model.reset(self.batch_size)
        return model

    def order(self, size: int, generator: torch.Generator) -> Tensor:
        """The windows, one after the other."""
        return torch.arange(size).unsqueeze(1)

    def before_forward(self, model: nn.Module, step_in_epoch: int) -> None:
        """Forget the text's end at its start."""
        if step_in_epoch == 0:
            model.reset(self.batch_size)  # type: ignore[operator]

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


@dataclass
class WordTransformers(Text):
    """The transformer of PyTorch's word-language-model example, on windows in random order.

    Args:
        dropout: dropout rate.
        warmup: steps over which the learning rate rises.
    """

    dropout: float = 0.0
    warmup: int = 50

    clip: ClassVar[float] = 1.0

    def model(self) -> nn.Module:
        """A new network, of the vocabulary's size."""
        return WordTransformer(len(data.vocabulary(data.PENN_TREEBANK)), dropout=self.dropout)

    def order(self, size: int, generator: torch.Generator) -> Tensor:
        """The windows in random order: no state is carried over."""
        return torch.randperm(size, generator=generator).unsqueeze(1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy."""
        return _cross_entropy(model(batch[0]), batch[1])


@dataclass
class CharacterGPT(WordTransformers):
    """A small GPT on the characters of the text."""

    length: int = 64

    def tokens(self, training: bool) -> Tensor:
        """The text, character by character."""
        return data.characters(data.PENN_TREEBANK, training)

    def model(self) -> nn.Module:
        """A new network, of the alphabet's size."""
        return GPT(len(data.alphabet(data.PENN_TREEBANK)), self.length)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
