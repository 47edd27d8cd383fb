"""Image classification: Fashion-MNIST, CIFAR-100 and Tiny ImageNet, prepared as in the paper's appendix C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cprop_lab.models import convolutional, fully_connected, resnet18, resnet50, vgg11, vgg16
from cprop_lab.workloads import data
from cprop_lab.workloads.task import Task

__all__ = [
    "Images",
    "cifar100_resnet",
    "cifar100_vgg",
    "fashion_mnist_cnn",
    "fashion_mnist_fc",
    "tiny_imagenet_resnet",
    "tiny_imagenet_vgg",
]


@dataclass
class Images(Task):
    """A network that tells the classes of a data set apart.

    Args:
        source: the data set.
        network: builds the network.
        channels: 1 for grey images, 3 for colour.
        padding: random crops are cut from images padded by this many pixels, and flipped; 0 leaves images alone.
        mean: of each channel over the training images, with ``std``; without them images are not normalised.
        std: of each channel.
    """

    source: data.Source
    network: Callable[[], nn.Module]
    channels: int = 3
    padding: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    metric: ClassVar[str] = "accuracy"

    def data(self) -> tuple[Any, Any]:
        """Images as bytes, and labels."""
        training, test = (data.images(self.source, split, self.channels) for split in (True, False))
        return training, test

    def model(self) -> nn.Module:
        """A new network, its convolutions laid out channels last: faster, or as fast, on the CPU measured."""
        model: nn.Module = self.network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    @cached_property
    def _augmentation(self) -> Callable[[Tensor], Tensor]:
        # Fashion-MNIST does without kornia, which takes a second to import.
        from kornia.augmentation import AugmentationSequential, RandomCrop, RandomHorizontalFlip

        size = 64 if self.source is data.TINY_IMAGENET else 32
        augmentation: Callable[[Tensor], Tensor] = AugmentationSequential(
            RandomCrop((size, size), padding=self.padding), RandomHorizontalFlip(p=0.5), data_keys=["input"]
        )
        return augmentation

    def prepare(self, batch: tuple[Tensor, Tensor], training: bool) -> tuple[Tensor, Tensor]:
        """Bytes to numbers in [0, 1]; crop and flip in training; normalise (the crop's zero padding comes first)."""
        images, labels = batch
        images = images.float().div_(255)
        if training and self.padding:
            images = self._augmentation(images)
        if self.mean:
            shape = (1, self.channels, 1, 1)
            mean, std = (torch.tensor(x, device=images.device).view(shape) for x in (self.mean, self.std))
            images = (images - mean) / std
        return images.to(memory_format=torch.channels_last), labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The cross-entropy, and the share of images whose class is found."""
        images, labels = batch
        logits = model(images)
        return {"loss": cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


# Of the channels: CIFAR-100's from its training images, for Tiny ImageNet the usual ones of ImageNet.
CIFAR100: Final[dict[str, Any]] = {
    "source": data.CIFAR100,
    "padding": 4,
    "mean": (0.50708, 0.48655, 0.44092),
    "std": (0.26733, 0.25644, 0.27615),
}
TINY_IMAGENET: Final[dict[str, Any]] = {
    "source": data.TINY_IMAGENET,
    "padding": 8,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}


def fashion_mnist_fc() -> Images:
    """The fully-connected network on Fashion-MNIST."""
    return Images(data.FASHION_MNIST, fully_connected, channels=1)


def fashion_mnist_cnn(dropout: float = 0.0) -> Images:
    """The convolutional network on Fashion-MNIST."""
    return Images(data.FASHION_MNIST, partial(convolutional, dropout=dropout), channels=1)


def cifar100_vgg() -> Images:
    """VGG11 on CIFAR-100."""
    return Images(network=vgg11, **CIFAR100)


def cifar100_resnet() -> Images:
    """ResNet18 on CIFAR-100."""
    return Images(network=resnet18, **CIFAR100)


def tiny_imagenet_vgg() -> Images:
    """VGG16 on Tiny ImageNet."""
    return Images(network=vgg16, **TINY_IMAGENET)


def tiny_imagenet_resnet() -> Images:
    """ResNet50 on Tiny ImageNet."""
    return Images(network=resnet50, **TINY_IMAGENET)
