"""Two transformers for language modelling: a small GPT, and the one of PyTorch's word-language-model example."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "WordTransformer"]


class Block(nn.Module):
    r"""A pre-norm transformer block.

    .. math::
        x \leftarrow x + \mathrm{Attention}(\mathrm{LN}(x)), \qquad
        x \leftarrow x + W_2\, \mathrm{GELU}(W_1\, \mathrm{LN}(x))

    Args:
        width: features per token.
        heads: attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run over ``x[batch, time, feature]``."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm, learned positions, output layer tied to the embedding.

    Weights start as in GPT-2: normal with a standard deviation of 0.02, divided by the square root of twice the number
    of layers where a block adds to its input.

    Args:
        tokens: size of the vocabulary.
        length: the longest context.
        layers: number of blocks.
        width: features per token.
        heads: attention heads per block.

    Example:
        >>> model = GPT(tokens=50, length=64)
        >>> model(torch.zeros(64, 16, dtype=torch.long)).shape
        torch.Size([64, 16, 50])

    References:
        Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019.
    """

    def __init__(self, tokens: int, length: int, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token: ``tokens[time, batch]`` to ``[time, batch, vocabulary]``."""
        positions = torch.arange(len(tokens), device=tokens.device)
        x = self.embedding(tokens.T) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(0, 1)


class WordTransformer(nn.Module):
    """The transformer of PyTorch's word-language-model example: post-norm, fixed positions, no tied weights.

    Kunstner et al. train it on Penn Treebank to compare SGD and Adam. The width of the feed-forward layers equals that
    of the embedding.

    Args:
        tokens: size of the vocabulary.
        layers: encoder layers.
        width: features per token.
        heads: attention heads per layer.
        dropout: dropout rate.

    Example:
        >>> model = WordTransformer(tokens=100)
        >>> model(torch.zeros(35, 20, dtype=torch.long)).shape
        torch.Size([35, 20, 100])

    References:
        Kunstner et al., *Noise Is Not the Main Factor Behind the Gap Between SGD and Adam*, 2023, appendix A.
    """

    def __init__(self, tokens: int, layers: int = 2, width: int = 200, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, width, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, tokens)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token: ``tokens[time, batch]`` to ``[time, batch, vocabulary]``."""
        x = self.embedding(tokens) * math.sqrt(self.width)
        x = self.dropout(x + sinusoids(len(tokens), self.width).to(x).unsqueeze(1))
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens), device=x.device, dtype=x.dtype)
        logits: Tensor = self.decoder(self.encoder(x, mask=mask, is_causal=True))
        return logits


def sinusoids(length: int, width: int) -> Tensor:
    r"""Fixed position codes: :math:`\sin(t / 10000^{2i/d})` and :math:`\cos(t / 10000^{2i/d})`, alternating.

    Example:
        >>> sinusoids(2, 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
