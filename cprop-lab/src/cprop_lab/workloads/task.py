"""What a run trains: data, a network, a loss. The interface for a task of your own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

__all__ = ["Task"]


class Task:
    r"""A training task: write :meth:`data`, :meth:`model` and :meth:`loss`, and the laboratory does the rest.

    .. math::
        \min_\theta \; \frac{1}{n} \sum_i \mathrm{loss}(\mathrm{model}_\theta, \mathrm{example}_i)

    Randomness comes from torch's global generator (and Python's ``random``): it is seeded before every step from the
    run's seed and the step, so that a run can be stopped anywhere and go on to the bit.

    Example:
        >>> class Line(Task):
        ...     def data(self):
        ...         x = torch.linspace(-1, 1, 64).unsqueeze(1)
        ...         return (x[::2], 3 * x[::2]), (x[1::2], 3 * x[1::2])
        ...     def model(self):
        ...         return nn.Linear(1, 1)
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(model(x), y)
        >>> task = Line()
        >>> training, test = task.data()
        >>> task.loss(task.model(), task.take(training, torch.arange(4))).ndim
        0
    """

    #: What :meth:`evaluate` gives beside the loss, for figures: ``"accuracy"``, ``"perplexity"`` or nothing.
    metric: ClassVar[str] = ""
    #: Set to the run's before anything is called.
    batch_size: int = 32
    #: Steps over which the learning rate rises to its value, for every optimizer alike.
    warmup: int = 0
    #: How many examples of the training and of the test data ``cprop-lab compare`` evaluates, unless it is told.
    examples: ClassVar[int] = 10_000

    def data(self) -> tuple[Any, Any]:
        """Training and test data: each a tuple of tensors of equal length, or a map-style dataset.

        Called once for all runs of a process that have the same options and batch size.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method data() that returns training and test data")

    def model(self) -> nn.Module:
        """A new network. Its initial weights come from torch's generator."""
        raise NotImplementedError(f"{type(self).__name__} needs a method model() that returns a network")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, to be differentiated."""
        raise NotImplementedError(f"{type(self).__name__} needs a method loss(model, batch) that returns a scalar")

    # What follows may stay as it is.

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Means over a batch: ``"loss"``, and ``"accuracy"`` where there is one."""
        return {"loss": self.loss(model, batch)}

    def prepare(self, batch: Any, training: bool) -> Any:
        """What is done to a whole batch before the network sees it; random augmentation if it is trained on."""
        return batch

    def order(self, size: int, generator: torch.Generator) -> Tensor:
        """The batches of an epoch, a row of indices each: by default every example once, in random order."""
        batches = size // self.batch_size
        if batches == 0:
            raise ValueError(
                f"there are {size} examples, and a batch takes {self.batch_size}: give a smaller batch size"
            )
        return torch.randperm(size, generator=generator)[: batches * self.batch_size].view(batches, self.batch_size)

    def take(self, data: Any, indices: Tensor) -> Any:
        """A batch of the data."""
        if isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data):
            return tuple(part[indices] for part in data)
        return default_collate([data[i] for i in indices.tolist()])

    def size(self, data: Any) -> int:
        """How many examples the data have."""
        return len(data[0]) if isinstance(data, (tuple, list)) and isinstance(data[0], Tensor) else len(data)

    def before_forward(self, model: nn.Module, step_in_epoch: int) -> None:
        """Called before every step; a recurrent network forgets its state at the start of an epoch."""

    def before_step(self, model: nn.Module) -> None:
        """Called between the gradient and the optimizer's step: the place to clip."""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around an evaluation; a recurrent network gets a state of its own."""
        return nullcontext()

    def evaluation_batch_size(self) -> int:
        """How many examples are evaluated at once: more than are trained on, since it is faster."""
        return max(self.batch_size, 500)
