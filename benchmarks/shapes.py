"""The parameter lists for timing a step."""

from __future__ import annotations

Shape = tuple[int, ...]


def fully_connected() -> list[Shape]:
    """The paper's 784-300-100-10 network: six tensors, dominated by call overhead."""
    return [(300, 784), (300,), (100, 300), (100,), (10, 100), (10,)]


def resnet_like() -> list[Shape]:
    """Many tensors of mixed size: 168 of them, 20 M parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 4), (128, 6), (256, 8), (512, 9)):
        for _ in range(blocks):
            squeeze = width // 2
            shapes += [(squeeze, channels, 1, 1), (squeeze,), (squeeze,)]
            shapes += [(width, squeeze, 3, 3), (width,), (width,)]
            channels = width
    return [*shapes, (1000, 512), (1000,), (2000, 2280)]


def matrices() -> list[Shape]:
    """24 square matrices and 24 vectors: 25 M parameters, dominated by memory bandwidth."""
    return [(1024, 1024)] * 24 + [(1024,)] * 24


def gpt2_small() -> list[Shape]:
    """GPT-2 small's parameters: 148 tensors, 124 M."""
    d = 768
    layer: list[Shape] = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    return [(50257, d), (1024, d), *(layer * 12), (d,), (d,)]


def small() -> list[Shape]:
    """1,000 vectors of 100 elements, dominated by call overhead."""
    return [(100,)] * 1000


SHAPES = {
    "1,000 small": small,
    "fully-connected": fully_connected,
    "resnet-like": resnet_like,
    "25M": matrices,
    "gpt2-small": gpt2_small,
}
