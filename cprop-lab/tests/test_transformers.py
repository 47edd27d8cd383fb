"""The two transformers: their layers and sizes, against torch's own layers, and that no token sees the future."""

import math

import pytest
import torch
from torch import nn

from cprop_lab.models.transformer import GPT, Block, WordTransformer


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_gpt_has_the_layers_and_the_size_it_says():
    model = GPT(tokens=50, length=128)
    block = 3 * 128 * 128 + 128 * 128 + 2 * 4 * 128 * 128 + 2 * 2 * 128  # qkv, out, up and down, two norms
    assert count(model) == 4 * block + 50 * 128 + 128 * 128 + 2 * 128  # embedding, positions, norm; no output layer
    assert [type(layer).__name__ for layer in model.blocks] == ["Block"] * 4


def test_the_word_transformer_is_the_one_of_the_example():
    model = WordTransformer(tokens=10_000)
    attention = 3 * 200 * 200 + 3 * 200 + 200 * 200 + 200
    layer = attention + 2 * (200 * 200 + 200) + 2 * 2 * 200
    assert count(model) == 10_000 * 200 + 2 * layer + 10_000 * 200 + 10_000
    dropouts = {module.p for module in WordTransformer(100, dropout=0.2).modules() if isinstance(module, nn.Dropout)}
    assert dropouts == {0.2}


def test_a_block_is_torchs_pre_norm_layer():
    torch.manual_seed(0)
    ours = Block(16, 4)
    theirs = nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", norm_first=True, batch_first=True, bias=False)
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(ours.qkv.weight)
        for one, other in (
            (theirs.self_attn.out_proj, ours.out),
            (theirs.linear1, ours.up),
            (theirs.linear2, ours.down),
        ):
            one.weight.copy_(other.weight)
    x = torch.randn(3, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model", [lambda: GPT(50, 32), lambda: WordTransformer(50)], ids=["gpt", "word"])
def test_no_token_sees_the_future_and_a_new_network_knows_nothing(model):
    torch.manual_seed(0)
    model = model().eval()
    tokens = torch.randint(50, (20, 4))
    changed = tokens.clone()
    changed[12:] = 0
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:12], after[:12])
    assert not torch.allclose(before[12:], after[12:])
    loss = nn.functional.cross_entropy(before[:-1].flatten(0, 1), tokens[1:].flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.5)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() > 1)
