"""The plain convolutional networks: Fashion-MNIST's CNN, Cifar's VGG11, Tiny Imagenet's VGG16."""

from __future__ import annotations

from typing import Final

from torch import nn

from cprop_lab.models.layers import POOL, classifier, parse_layers

__all__ = ["convolutional", "vgg11", "vgg16"]

CNN: Final = "16, M, 32, M, 64, M, 128"
VGG11: Final = "64, M, 128, M, 256, 256, M, 512, 512, M, 512, 512, M"
VGG16: Final = "64, 64, M, 128, 128, M, 256, 256, 256, M, 512, 512, 512, M, 512, 512, 512, M"


def features(text: str, inputs: int, normalise: bool = False, dropout: float = 0.0) -> tuple[list[nn.Module], int]:
    """The modules that a layer list denotes, and how many channels come out of them."""
    layers: list[nn.Module] = []
    for layer in parse_layers(text):
        if layer == POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        # The paper does not say whether a convolution before batch norm has a bias: torchvision's VGG keeps it.
        layers.append(layer.build(inputs))
        inputs = layer.channels
        if normalise:
            layers.append(nn.BatchNorm2d(inputs))
        layers.append(nn.ReLU())
        if dropout > 0:
            layers.append(nn.Dropout2d(dropout))
    return layers, inputs


def convolutional(classes: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Fashion-MNIST's CNN (appendix, "Fashion MNIST's CNN architecture").

    Args:
        classes: the number of classes.
        dropout: how likely a channel is dropped, after each ReLU; the paper's is 0.3 where it has one (section 4.6).

    Example:
        >>> import torch
        >>> convolutional()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    layers, channels = features(CNN, inputs=1, dropout=dropout)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, classes, 1), nn.Flatten())


def vgg11(classes: int = 100) -> nn.Sequential:
    """Cifar's VGG11 with batch norm (appendix, "Cifar's VGG11 architecture").

    Example:
        >>> import torch
        >>> vgg11()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    return vgg(VGG11, classes)


def vgg16(classes: int = 200) -> nn.Sequential:
    """Tiny Imagenet's VGG16 with batch norm (appendix, "Tiny Imagenet's VGG16 architecture").

    Example:
        >>> import torch
        >>> vgg16()(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 200])
    """
    return vgg(VGG16, classes)


def vgg(text: str, classes: int) -> nn.Sequential:
    """A VGG with batch norm and a single fully-connected layer."""
    layers, channels = features(text, inputs=3, normalise=True)
    return nn.Sequential(*layers, *classifier(channels, classes))
