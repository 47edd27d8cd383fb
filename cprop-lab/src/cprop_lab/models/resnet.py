"""The residual networks: Cifar's ResNet18, Tiny Imagenet's ResNet50."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from torch import Tensor, nn
from torch.nn import functional as F

from cprop_lab.models.layers import Convolution, classifier

__all__ = ["Residual", "resnet18", "resnet50"]

RESNET18: Final = "64, [64, 64]x2, [128D, 128], [128, 128], [256D, 256], [256, 256], [512D, 512], [512, 512]"
RESNET50: Final = (
    "64, [64I, 64, 256I]x3, [128I, 128D, 512I], [128I, 128, 512I]x2, "
    "[256I, 256D, 1024I], [256I, 256, 1024I]x2, [512I, 512D, 2048I], [512I, 512, 2048I]x2"
)


def normalised(convolution: Convolution, inputs: int) -> list[nn.Module]:
    """A convolution and its batch norm."""
    # The paper does not say whether the convolution has a bias: torchvision's ResNet has none.
    return [convolution.build(inputs, bias=False), nn.BatchNorm2d(convolution.channels)]


class Residual(nn.Module):
    """Convolutions whose input is added to their output, and a ReLU after the addition.

    The paper has batch norm and ReLU "after each convolution layer"; the last ReLU comes after the
    addition, as in He et al. (2016). A 1x1 convolution with batch norm makes the shortcut fit where
    the shapes differ.

    Args:
        inputs: the number of channels of the input.
        convolutions: what a bracket of the layer list holds.

    Example:
        >>> import torch
        >>> block = Residual(64, [Convolution(128, stride=2), Convolution(128)])
        >>> block(torch.zeros(2, 64, 8, 8)).shape
        torch.Size([2, 128, 4, 4])
    """

    def __init__(self, inputs: int, convolutions: Sequence[Convolution]) -> None:
        super().__init__()
        outputs = convolutions[-1].channels
        stride = math.prod(convolution.stride for convolution in convolutions)
        fits = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if fits else normalised(Convolution(outputs, 1, stride), inputs)))
        layers: list[nn.Module] = []
        for convolution in convolutions:
            layers += [*normalised(convolution, inputs), nn.ReLU()]
            inputs = convolution.channels
        self.residual = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Two paths, added."""
        return F.relu(self.residual(x) + self.shortcut(x))


def resnet18(classes: int = 100) -> nn.Sequential:
    """Cifar's ResNet18: a 3x3 stem, and no pooling after it (appendix, "Cifar's Resnet18 architecture").

    Example:
        >>> import torch
        >>> resnet18()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    return resnet(RESNET18, classes)


def resnet50(classes: int = 200) -> nn.Sequential:
    """Tiny Imagenet's ResNet50 (appendix, "Tiny Imagenet's Resnet50 architecture").

    The paper lists stages of 3, 3, 3 and 3 bottlenecks, which is what is built: 38 layers of weights.
    The network usually called ResNet50 has 3, 4, 6 and 3.

    Example:
        >>> import torch
        >>> resnet50()(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 200])
    """
    return resnet(RESNET50, classes)


def resnet(text: str, classes: int) -> nn.Sequential:
    """The network that a layer list denotes: a stem, and residual blocks in brackets, "x2" for two in a row."""
    stem = Convolution.parse(text.partition(", ")[0])
    channels = stem.channels
    layers = [*normalised(stem, inputs=3), nn.ReLU()]
    for inside, times in re.findall(r"\[(.*?)\](?:x(\d))?", text):
        convolutions = [Convolution.parse(layer) for layer in inside.split(", ")]
        for _ in range(int(times or 1)):
            layers.append(Residual(channels, convolutions))
            channels = convolutions[-1].channels
    return nn.Sequential(*layers, *classifier(channels, classes))
