"""The networks are those of the paper's appendix A: layer by layer, and to the last parameter."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from cprop_lab.models import AWDLSTM, Dropouts, convolutional, fully_connected, resnet18, resnet50, vgg11, vgg16
from cprop_lab.models.awd_lstm import Output, regularisation, variational
from cprop_lab.models.resnet import Block


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def notation(layers):
    """A stack of layers, in the appendix's notation."""
    words = {nn.MaxPool2d: "M", nn.ReLU: "R", nn.BatchNorm2d: "B", nn.Dropout2d: "d", nn.AdaptiveAvgPool2d: "avg"}
    found = []
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            assert layer.padding == (layer.kernel_size[0] // 2,) * 2
            kind = "" if layer.kernel_size == (3, 3) else "I"
            found.append(f"{layer.out_channels}{kind}{'D' if layer.stride == (2, 2) else ''}")
        elif isinstance(layer, nn.Linear):
            found.append(f"{layer.in_features}-{layer.out_features}")
        elif not isinstance(layer, nn.Flatten):
            found.append(words[type(layer)])
    return " ".join(found)


def flat(block):
    return [layer for part in block for layer in (part if isinstance(part, nn.Sequential) else [part])]


def test_fully_connected():
    model = fully_connected()
    assert notation(model) == "784-300 R 300-100 R 100-10"
    assert parameters(model) == (784 + 1) * 300 + (300 + 1) * 100 + (100 + 1) * 10
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_convolutional():
    model = convolutional()
    assert notation(model) == "16 R M 32 R M 64 R M 128 R avg 10I"
    convolutions = sum((9 * a + 1) * b for a, b in ((1, 16), (16, 32), (32, 64), (64, 128)))
    assert parameters(model) == convolutions + (128 + 1) * 10


def test_convolutional_with_dropout():
    model = convolutional(dropout=0.3)
    assert notation(model) == "16 R d M 32 R d M 64 R d M 128 R d avg 10I"
    assert {layer.p for layer in model if isinstance(layer, nn.Dropout2d)} == {0.3}
    torch.manual_seed(0)
    x = torch.rand(2, 1, 28, 28)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("build", "appendix", "size", "classes"),
    [
        (vgg11, "64 M 128 M 256 256 M 512 512 M 512 512 M", 32, 100),
        (vgg16, "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M", 64, 200),
    ],
)
def test_vgg(build, appendix, size, classes):
    model = build()
    expected = " ".join(part if part == "M" else f"{part} B R" for part in appendix.split())
    assert notation(model) == f"{expected} avg 512-{classes}"
    channels = [3, *(int(part) for part in appendix.split() if part != "M")]
    layers = sum((9 * a + 1) * b + 2 * b for a, b in pairwise(channels))
    assert parameters(model) == layers + 513 * classes
    assert model(torch.zeros(2, 3, size, size)).shape == (2, classes)


@pytest.mark.parametrize(
    ("build", "appendix", "size", "classes", "last"),
    [
        (resnet18, "64 64|64 64|128D 128|128 128|256D 256|256 256|512D 512|512 512", 32, 100, 512),
        (
            resnet50,
            "|".join(
                ["64I 64 256I"] * 3
                + ["128I 128D 512I", *["128I 128 512I"] * 2]
                + ["256I 256D 1024I", *["256I 256 1024I"] * 2]
                + ["512I 512D 2048I", *["512I 512 2048I"] * 2]
            ),
            64,
            200,
            2048,
        ),
    ],
)
def test_resnet(build, appendix, size, classes, last):
    model = build()
    blocks = [layer for layer in model if isinstance(layer, Block)]
    for block, line in zip(blocks, appendix.split("|"), strict=True):
        expected = " R ".join(f"{part} B" for part in line.split())
        assert notation(flat(block.residual)) == expected
    assert notation(model[0]) == "64 B"
    assert notation(model[len(blocks) + 2 :]) == f"avg {last}-{classes}"
    assert model(torch.zeros(2, 3, size, size)).shape == (2, classes)
    # An image is halved three times: the global average is over what is left of it.
    assert model[:-3](torch.zeros(1, 3, size, size)).shape[-1] == size // 8


def test_resnet_parameters():
    def convolution(inputs, outputs, kernel):
        return kernel * kernel * inputs * outputs + 2 * outputs

    total = convolution(3, 64, 3) + 513 * 100
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        total += convolution(inputs, outputs, 3) + 3 * convolution(outputs, outputs, 3)
        total += convolution(inputs, outputs, 1) if inputs != outputs else 0
    assert parameters(resnet18()) == total

    total = convolution(3, 64, 3) + 2049 * 200
    for inputs, width in ((64, 64), (256, 128), (512, 256), (1024, 512)):
        wide = 4 * width
        total += convolution(inputs, width, 1) + convolution(inputs, wide, 1)
        total += 2 * convolution(wide, width, 1) + 3 * (convolution(width, width, 3) + convolution(width, wide, 1))
    assert parameters(resnet50()) == total


def test_shortcuts_are_there_where_shapes_differ():
    convolved = [not isinstance(b.shortcut, nn.Identity) for b in resnet18() if isinstance(b, Block)]
    assert convolved == [False, False, True, False, True, False, True, False]
    convolved = [not isinstance(b.shortcut, nn.Identity) for b in resnet50() if isinstance(b, Block)]
    assert convolved == [True, False, False] * 4


def small(dropout=None):
    torch.manual_seed(0)
    model = AWDLSTM(words=30, embedding=6, units=10, dropout=dropout or Dropouts())
    model.reset(4)
    return model


TOKENS = torch.randint(30, (70, 4), generator=torch.Generator().manual_seed(1))


def test_awd_lstm_of_the_paper():
    model = AWDLSTM()
    sizes = [(layer.input_size, layer.hidden_size) for layer in model.layers]
    assert sizes == [(400, 1150), (1150, 1150), (1150, 400)]
    gates = sum(4 * (i * h + h * h + 2 * h) for i, h in sizes)
    assert parameters(model) == 10_000 * 400 + 10_000 + gates == 24_221_600  # the output layer is the embedding
    assert model.embedding.abs().max() <= 0.1
    assert Dropouts() == Dropouts(embedding=0.1, input=0.4, layer=0.25, output=0.4, weight=0.5)


def test_the_hidden_state_is_carried_over_without_its_gradient():
    at_once, in_two = small(Dropouts.none()).eval(), small(Dropouts.none()).eval()
    whole = at_once(TOKENS).logits
    parts = torch.cat([in_two(TOKENS[:35]).logits, in_two(TOKENS[35:]).logits])
    torch.testing.assert_close(whole, parts)
    assert not any(buffer.requires_grad for buffer in in_two.buffers())


def test_a_checkpoint_holds_the_hidden_state_whatever_the_batch():
    one = small(Dropouts.none())
    one(TOKENS[:35])
    other = AWDLSTM(words=30, embedding=6, units=10, dropout=Dropouts.none())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(TOKENS[35:]).logits, other(TOKENS[35:]).logits)


def test_another_text_in_between_leaves_the_hidden_state_alone():
    disturbed, alone = small(Dropouts.none()), small(Dropouts.none())
    for model in (disturbed, alone):
        model(TOKENS[:35])
    with disturbed.fresh(batch=2):
        first = disturbed(TOKENS[:10, :2]).logits
        torch.testing.assert_close(first, small(Dropouts.none())(TOKENS[:10]).logits[:, :2])
    assert torch.equal(disturbed(TOKENS[35:]).logits, alone(TOKENS[35:]).logits)


def test_resetting_forgets():
    model = small(Dropouts.none())
    first = model(TOKENS[:35]).logits
    assert not torch.equal(model(TOKENS[:35]).logits, first)
    model.reset(4)
    assert torch.equal(model(TOKENS[:35]).logits, first)


def test_every_parameter_gets_a_gradient_through_all_dropouts():
    model = small()
    output = model(TOKENS[:35])
    (output.logits.logsumexp(-1).mean() + regularisation(output)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_weight_drop_leaves_the_parameter_and_changes_the_output():
    model = small(Dropouts(0, 0, 0, 0, weight=0.5))
    before = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(1)
    first = model(TOKENS[:35]).logits
    model.reset(4)
    assert not torch.equal(model(TOKENS[:35]).logits, first)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.eval()
    model.reset(4)
    evaluated = model(TOKENS[:35]).logits
    model.reset(4)
    assert torch.equal(model(TOKENS[:35]).logits, evaluated)


def test_a_variational_mask_is_one_for_all_time_steps():
    torch.manual_seed(0)
    dropped = variational(torch.ones(35, 4, 100), 0.4, training=True)
    assert (dropped == dropped[:1]).all()
    assert (dropped == 0).float().mean().item() == pytest.approx(0.4, abs=0.1)
    assert dropped.mean().item() == pytest.approx(1, abs=0.1)
    assert variational(dropped, 0.4, training=False) is dropped


def test_regularisation_by_hand():
    raw = torch.tensor([[[1.0]], [[3.0]], [[4.0]]])
    output = Output(torch.empty(0), 2 * raw, raw)
    expected = 2 * (4 + 36 + 64) / 3 + 1 * (4 + 1) / 2
    assert regularisation(output).item() == pytest.approx(expected)
    assert regularisation(Output(torch.empty(0), raw[:1], raw[:1])).item() == 2.0
