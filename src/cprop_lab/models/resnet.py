"""ResNet18 and ResNet50 for small images (appendix A.4 and A.6)."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor, nn

from cprop_lab.models.convolutional import head

__all__ = ["Block", "resnet18", "resnet50"]

RESNET18 = "[64, 64] [64, 64] [128D, 128] [128, 128] [256D, 256] [256, 256] [512D, 512] [512, 512]"
# As the appendix has it: three blocks a stage. The ResNet50 of He et al. has 3, 4, 6 and 3.
RESNET50 = " ".join(
    f"[{c}I, {c}{stride}, {4 * c}I]" for c in (64, 128, 256, 512) for stride in ("" if c == 64 else "D", "", "")
)


class Convolution(NamedTuple):
    """A convolution in the appendix's notation: channels, I for a 1x1 kernel (else 3x3), D for a stride of two."""

    channels: int
    kernel: int
    stride: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one.

        Example:
            >>> Convolution.parse("128D"), Convolution.parse("256I")
            (Convolution(channels=128, kernel=3, stride=2), Convolution(channels=256, kernel=1, stride=1))
        """
        return cls(int(text.rstrip("ID")), 1 if "I" in text else 3, 2 if "D" in text else 1)

    def build(self, channels: int) -> nn.Sequential:
        """With batch normalisation, which makes a bias useless."""
        return nn.Sequential(
            nn.Conv2d(channels, self.channels, self.kernel, self.stride, padding=self.kernel // 2, bias=False),
            nn.BatchNorm2d(self.channels),
        )


class Block(nn.Module):
    """A residual block: its input is added to its output, through a 1x1 convolution if their shapes differ.

    "Batch normalization and ReLU are applied after each convolution layer"; the last ReLU follows the sum, as in
    He et al. (2016).
    """

    def __init__(self, channels: int, convolutions: list[Convolution]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for convolution in convolutions:
            layers += [convolution.build(inputs), nn.ReLU(inplace=True)]
            inputs = convolution.channels
        self.residual = nn.Sequential(*layers[:-1])
        stride = max(convolution.stride for convolution in convolutions)
        same = stride == 1 and inputs == channels
        self.shortcut = nn.Identity() if same else Convolution(inputs, 1, stride).build(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        out: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return out


def _resnet(notation: str, classes: int) -> nn.Sequential:
    channels = 64
    layers: list[nn.Module] = [Convolution(channels, 3, 1).build(3), nn.ReLU(inplace=True)]
    for block in notation.strip("[]").split("] ["):
        convolutions = [Convolution.parse(text) for text in block.split(", ")]
        layers.append(Block(channels, convolutions))
        channels = convolutions[-1].channels
    return nn.Sequential(*layers, *head(channels, classes))


def resnet18(classes: int = 100) -> nn.Sequential:
    """CIFAR-100's ResNet18: no pooling after the first layer, for the images are small.

    Example:
        >>> import torch
        >>> resnet18()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    return _resnet(RESNET18, classes)


def resnet50(classes: int = 200) -> nn.Sequential:
    """Tiny ImageNet's ResNet50, with the appendix's twelve blocks."""
    return _resnet(RESNET50, classes)
