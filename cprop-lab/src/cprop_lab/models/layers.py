"""The notation of the appendix's layer lists, and the layers that several of its networks share."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from torch import nn

__all__ = ["POOL", "Convolution", "classifier", "parse_layers"]

POOL: Final = "M"
"""2x2 max-pooling."""


class Convolution(NamedTuple):
    """One convolution of a layer list, padded to keep the size of the image.

    Example:
        >>> Convolution.parse("128D")
        Convolution(channels=128, kernel=3, stride=2)
        >>> Convolution.parse("256I")
        Convolution(channels=256, kernel=1, stride=1)
    """

    channels: int
    kernel: int = 3
    stride: int = 1

    @classmethod
    def parse(cls, text: str) -> Convolution:
        """Read "64": 64 channels out of a 3x3 kernel; "64I": of a 1x1 kernel; "64D": with stride 2."""
        match = re.fullmatch(r"(\d+)(I?)(D?)", text)
        if match is None:
            raise ValueError(f"invalid layer {text!r}: a number of channels, then I for 1x1, then D for stride 2")
        channels, one_by_one, down = match.groups()
        return cls(int(channels), kernel=1 if one_by_one else 3, stride=2 if down else 1)

    def build(self, inputs: int, bias: bool = True) -> nn.Conv2d:
        """The module, for an image of ``inputs`` channels."""
        return nn.Conv2d(inputs, self.channels, self.kernel, self.stride, padding=self.kernel // 2, bias=bias)


def parse_layers(text: str) -> list[Convolution | Literal["M"]]:
    """Read a list of convolutions and poolings, separated by commas.

    Example:
        >>> parse_layers("16, M")
        [Convolution(channels=16, kernel=3, stride=1), 'M']
    """
    return [POOL if layer == POOL else Convolution.parse(layer) for layer in text.split(", ")]


def classifier(inputs: int, classes: int) -> list[nn.Module]:
    """Global average pooling and a fully-connected layer: the end of every VGG and ResNet of the paper."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
