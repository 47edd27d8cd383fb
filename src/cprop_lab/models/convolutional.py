"""Plain stacks of convolutions: Fashion-MNIST's CNN, VGG11 and VGG16 (appendix A.2, A.3 and A.5)."""

from __future__ import annotations

from torch import nn

__all__ = ["convolutional", "vgg11", "vgg16"]

# The appendix's notation: the number of channels that a 3x3 convolution gives, or M for a 2x2 max-pooling.
CNN = "16, M, 32, M, 64, M, 128"
VGG11 = "64, M, 128, M, 256, 256, M, 512, 512, M, 512, 512, M"
VGG16 = "64, 64, M, 128, 128, M, 256, 256, 256, M, 512, 512, 512, M, 512, 512, 512, M"


def stack(notation: str, channels: int, batch_norm: bool, dropout: float = 0.0) -> tuple[list[nn.Module], int]:
    """The layers that a line of the appendix stands for, and how many channels the last of them gives.

    Args:
        notation: as in the appendix.
        channels: of the images.
        batch_norm: after each convolution. Its bias stays: the paper does not say, and VGG is commonly built so.
        dropout: of whole channels, after each ReLU.
    """
    layers: list[nn.Module] = []
    for part in notation.split(", "):
        if part == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(channels, int(part), 3, padding=1))
        channels = int(part)
        layers += [nn.BatchNorm2d(channels)] if batch_norm else []
        layers.append(nn.ReLU(inplace=True))
        layers += [nn.Dropout2d(dropout)] if dropout else []
    return layers, channels


def convolutional(classes: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Fashion-MNIST's CNN: global average pooling, and a 1x1 convolution to the logits.

    Example:
        >>> import torch
        >>> convolutional()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    layers, channels = stack(CNN, 1, batch_norm=False, dropout=dropout)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, classes, 1), nn.Flatten())


def _vgg(notation: str, classes: int) -> nn.Sequential:
    layers, channels = stack(notation, 3, batch_norm=True)
    return nn.Sequential(*layers, *head(channels, classes))


def head(channels: int, classes: int) -> list[nn.Module]:
    """Global average pooling and a fully-connected layer: the "smaller classification layers" of the appendix."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def vgg11(classes: int = 100) -> nn.Sequential:
    """CIFAR-100's VGG11. The appendix's list has one 64 and one 128, as VGG11 has."""
    return _vgg(VGG11, classes)


def vgg16(classes: int = 200) -> nn.Sequential:
    """Tiny ImageNet's VGG16."""
    return _vgg(VGG16, classes)
