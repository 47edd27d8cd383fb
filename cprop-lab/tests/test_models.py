"""The networks are the ones the paper's appendix lists."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cprop_lab.models import (
    AWDLSTM,
    Dropouts,
    Output,
    convolutional,
    fully_connected,
    regularisation,
    resnet18,
    resnet50,
    vgg11,
    vgg16,
)
from cprop_lab.models.layers import Convolution
from cprop_lab.models.lstm import LSTM
from cprop_lab.models.resnet import Residual


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def count(model):
    return sum(p.numel() for p in model.parameters())


def kinds(modules):
    return [type(module).__name__ for module in modules]


# --- images


def notation(model):
    """The layers of a network, read back into the appendix's notation."""
    written = []
    for module in model:
        if isinstance(module, nn.Conv2d):
            assert module.padding == ((module.kernel_size[0] - 1) // 2,) * 2
            kernel = {(3, 3): "", (1, 1): "I"}[module.kernel_size]
            stride = {(1, 1): "", (2, 2): "D"}[module.stride]
            written.append(f"{module.out_channels}{kernel}{stride}")
        elif isinstance(module, nn.MaxPool2d):
            assert (module.kernel_size, module.stride) == (2, 2)
            written.append("M")
        elif isinstance(module, Residual):
            written.append(f"[{notation(module.residual)}]")
    return ", ".join(written)


PAPERS_LAYERS = {
    convolutional: "16, M, 32, M, 64, M, 128, 10I",
    vgg11: "64, M, 128, M, 256, 256, M, 512, 512, M, 512, 512, M",
    vgg16: "64, 64, M, 128, 128, M, 256, 256, 256, M, 512, 512, 512, M, 512, 512, 512, M",
    resnet18: "64, [64, 64], [64, 64], [128D, 128], [128, 128], [256D, 256], [256, 256], [512D, 512], [512, 512]",
    resnet50: (
        "64, [64I, 64, 256I], [64I, 64, 256I], [64I, 64, 256I], "
        "[128I, 128D, 512I], [128I, 128, 512I], [128I, 128, 512I], "
        "[256I, 256D, 1024I], [256I, 256, 1024I], [256I, 256, 1024I], "
        "[512I, 512D, 2048I], [512I, 512, 2048I], [512I, 512, 2048I]"
    ),
}


@pytest.mark.parametrize("build", PAPERS_LAYERS, ids=lambda build: build.__name__)
def test_the_layers_are_the_papers(build):
    assert notation(build()) == PAPERS_LAYERS[build]


def conv(*channels, bias=True):
    """Parameters of 3x3 convolutions in a row."""
    return sum(9 * i * o + bias * o for i, o in pairwise(channels))


def basic(i, o):
    """Parameters of a basic block: two 3x3 convolutions and a scale and shift a channel, and the shortcut's."""
    return conv(i, o, o, bias=False) + 2 * (2 * o) + (i != o) * (i * o + 2 * o)


def bottleneck(i, m):
    """Parameters of a bottleneck: 1x1 to m channels, 3x3, 1x1 to 4m."""
    o = 4 * m
    return (i * m + 9 * m * m + m * o) + 2 * (m + m + o) + (i != o) * (i * o + 2 * o)


VGG11_CHANNELS = (64, 128, 256, 256, 512, 512, 512, 512)
VGG16_CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
STEM = 3 * 64 * 9 + 2 * 64

# What is built: the shape of an image, the number of classes, and parameters by hand, in two ways.
IMAGES = [
    (fully_connected, (1, 28, 28), 10, (784 + 1) * 300 + (300 + 1) * 100 + (100 + 1) * 10, 266_610),
    (convolutional, (1, 28, 28), 10, conv(1, 16, 32, 64, 128) + (128 + 1) * 10, 98_442),
    (vgg11, (3, 32, 32), 100, conv(3, *VGG11_CHANNELS) + 2 * sum(VGG11_CHANNELS) + 513 * 100, 9_277_284),
    (vgg16, (3, 64, 64), 200, conv(3, *VGG16_CHANNELS) + 2 * sum(VGG16_CHANNELS) + 513 * 200, 14_825_736),
    (
        resnet18,
        (3, 32, 32),
        100,
        STEM
        + (basic(64, 64) + basic(64, 64))
        + (basic(64, 128) + basic(128, 128))
        + (basic(128, 256) + basic(256, 256))
        + (basic(256, 512) + basic(512, 512))
        + 513 * 100,
        11_220_132,
    ),
    (
        resnet50,
        (3, 64, 64),
        200,
        STEM
        + (bottleneck(64, 64) + 2 * bottleneck(256, 64))
        + (bottleneck(256, 128) + 2 * bottleneck(512, 128))
        + (bottleneck(512, 256) + 2 * bottleneck(1024, 256))
        + (bottleneck(1024, 512) + 2 * bottleneck(2048, 512))
        + 2049 * 200,
        # torchvision's, less its head, a 7x7 stem for a 3x3 one, and one and three bottlenecks; and our head.
        (25_557_032 - 2_049_000) - (9_408 - 1_728) - 280_064 - 3 * 1_117_184 + 409_800,
    ),
]


@pytest.mark.parametrize(
    ("build", "image", "classes", "by_hand", "number"),
    [pytest.param(*row, id=row[0].__name__, marks=() if row[-1] < 1e6 else pytest.mark.slow) for row in IMAGES],
)
def test_parameters_shapes_and_gradients(build, image, classes, by_hand, number):
    model = build()
    assert count(model) == by_hand == number
    logits = model(torch.randn(2, *image))
    assert logits.shape == (2, classes)
    F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_number_of_classes_is_a_choice():
    assert [list(build(classes=7).parameters())[-1].shape for build in (convolutional, vgg11, resnet18)] == [(7,)] * 3
    assert fully_connected((4, 3, 2))(torch.zeros(5, 2, 2)).shape == (5, 2)


def test_relu_after_each_fully_connected_layer_but_the_last():
    model = fully_connected()
    assert kinds(model) == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [300, 100, 10]


@pytest.mark.slow
def test_what_follows_a_convolution():
    head = ["AdaptiveAvgPool2d", "Flatten", "Linear"]
    assert kinds(convolutional())[:3] == ["Conv2d", "ReLU", "MaxPool2d"]
    assert kinds(convolutional())[-4:] == ["ReLU", "AdaptiveAvgPool2d", "Conv2d", "Flatten"]
    assert kinds(vgg11())[:4] == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    assert kinds(vgg11())[-3:] == kinds(resnet18())[-3:] == head
    assert kinds(resnet18())[:4] == ["Conv2d", "BatchNorm2d", "ReLU", "Residual"]
    for build in (vgg11, resnet18):
        convolutions = [m for m in build().modules() if isinstance(m, nn.Conv2d)]
        assert {m.bias is not None for m in convolutions} == {build is vgg11}  # torchvision's choices


def test_dropout_of_channels_follows_each_relu_where_it_is_wanted():
    assert "Dropout2d" not in kinds(convolutional())
    model = convolutional(dropout=0.3)
    after_relu = [b for a, b in pairwise(model) if isinstance(a, nn.ReLU)]
    assert kinds(after_relu) == ["Dropout2d"] * 4
    assert {layer.p for layer in after_relu} == {0.3}
    x = torch.randn(2, 1, 28, 28)
    assert not torch.equal(model(x), model(x))
    plain = convolutional()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    assert torch.equal(model.eval()(x), plain(x))
    channels = model.train()[:3](x).abs().amax((2, 3))
    assert 0 < (channels == 0).float().mean() < 1


def test_the_last_relu_of_a_block_comes_after_the_addition():
    block = Residual(8, [Convolution(4, kernel=1), Convolution(4), Convolution(8, kernel=1)])
    assert kinds(block.residual) == ["Conv2d", "BatchNorm2d", "ReLU"] * 2 + ["Conv2d", "BatchNorm2d"]
    nn.init.zeros_(block.residual[-1].weight)  # nothing is added
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(block(x), x.relu())


@pytest.mark.parametrize(("inputs", "stride", "fits"), [(8, 1, True), (8, 2, False), (4, 1, False), (4, 2, False)])
def test_the_shortcut_is_convolved_where_shapes_differ(inputs, stride, fits):
    block = Residual(inputs, [Convolution(8, stride=stride), Convolution(8)])
    assert kinds(block.shortcut) == ([] if fits else ["Conv2d", "BatchNorm2d"])
    assert notation(block.shortcut) == ("" if fits else "8I" + "D" * (stride == 2))
    assert block(torch.randn(2, inputs, 6, 6)).shape == (2, 8, 6 // stride, 6 // stride)


def test_a_layer_that_is_not_in_the_notation_is_refused():
    with pytest.raises(ValueError, match=r"invalid layer '64X': a number of channels, then I for 1x1, then D for str"):
        Convolution.parse("64X")


# --- language


def small(dropout=None, **sizes):
    sizes = {"words": 60, "embedding": 12, "units": 20, **sizes}
    return AWDLSTM(**sizes, dropout=Dropouts() if dropout is None else dropout)


def only(**dropouts):
    return Dropouts(**{**vars(Dropouts.none()), **dropouts})


def text(time=35, batch=4, words=60, seed=0):
    return torch.randint(words, (time, batch), generator=torch.Generator().manual_seed(seed))


def state(model):
    return [tensor.clone() for layer in model.carry() for tensor in layer]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def train_on(model, tokens, seed):
    """One step of plain SGD; dropout is seeded before it, as in a run."""
    torch.manual_seed(seed)
    output = model(tokens[:-1])
    loss = F.cross_entropy(output.logits.flatten(0, 1), tokens[1:].flatten()) + regularisation(output)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
    return loss.item()


def seen_by_lstms(model, tokens):
    """Each LSTM's input, and its hidden-to-hidden weight, while the model runs."""
    inputs, weights = [], []

    def look(lstm, args):
        inputs.append(args[0].detach())
        weights.append(lstm.weight_hh_l0)

    hooks = [lstm.register_forward_pre_hook(look) for lstm in model.lstms]
    output = model(tokens)
    for hook in hooks:
        hook.remove()
    return output, inputs, weights


def lstm_and_input(dtype=torch.float32):
    torch.manual_seed(0)
    return LSTM(5, 7).to(dtype), [torch.randn(*size, dtype=dtype) for size in ((6, 3, 5), (1, 3, 7), (1, 3, 7))]


def run_lstm(forward, lstm, inputs):
    """Outputs and last state, and the gradients of all that goes in."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    x, *state = inputs
    y, last = forward(lstm, x, tuple(state))
    weights = [torch.linspace(-1, 1, part.numel()).view_as(part) for part in (y, *last)]
    loss = sum((part.float() * weight).sum() for part, weight in zip((y, *last), weights, strict=True))
    return [y, *last, *torch.autograd.grad(loss, [*inputs, *lstm.parameters()])]


def assert_close_to_the_largest(ours, torchs, tolerance):
    """Tensors by tensors, to a part of the largest element of each."""
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.03)])
def test_the_lstm_is_torchs(precision, tolerance):
    lstm, inputs = lstm_and_input()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        ours, torchs = (run_lstm(forward, lstm, inputs) for forward in (LSTM.forward, nn.LSTM.forward))
    assert ours[0].dtype == torchs[0].dtype
    assert_close_to_the_largest(ours, torchs, tolerance)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.03)])
def test_an_evaluation_carries_the_same_state_from_window_to_window(precision, tolerance):
    torch.manual_seed(0)
    model, windows = small(Dropouts.none()).eval(), torch.randint(0, 60, (4, 9, 3))
    found = []
    for grad in (True, False):  # ours, and torch's
        with torch.set_grad_enabled(grad), model.fresh(3), torch.autocast("cpu", enabled=precision == "bfloat16"):
            found.append(
                [[model(window).logits, *(part for state in model.carry() for part in state)] for window in windows]
            )
    for ours, torchs in zip(*found, strict=True):
        assert_close_to_the_largest(ours, torchs, tolerance)


@pytest.mark.slow
def test_the_gradients_of_the_lstm():
    lstm, (x, *state) = lstm_and_input(torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, *state)]

    def run(x, hidden, cell, *_):
        y, last = lstm(x, (hidden, cell))
        return y, *last

    assert torch.autograd.gradcheck(run, (*leaves, *lstm.parameters()))


def test_the_language_model_is_the_papers():
    model = AWDLSTM()
    assert [(m.input_size, m.hidden_size) for m in model.lstms] == [(400, 1150), (1150, 1150), (1150, 400)]
    assert model.dropout == Dropouts(embedding=0.1, input=0.4, layer=0.25, output=0.4, weight=0.5)
    # Embedding, tied; bias; and for each LSTM four gates of inputs, hidden units and torch's two biases.
    lstms = 4 * 1150 * (400 + 1150 + 2) + 4 * 1150 * (1150 + 1150 + 2) + 4 * 400 * (1150 + 400 + 2)
    assert count(model) == 10_000 * 400 + 10_000 + lstms == 24_221_600
    assert model.embedding.weight.abs().max() <= 0.1
    assert model.embedding.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=1e-2)
    assert not model.output_bias.any()


def test_without_dropout_means_zero_everywhere():
    assert set(vars(Dropouts.none()).values()) == {0.0}
    with pytest.raises(AttributeError):
        Dropouts.none().weight = 0.5


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_shapes_and_gradients(layers):
    model = small(layers=layers)
    output = model(text())
    assert [tuple(x.shape) for x in output] == [(35, 4, 60), (35, 4, 12), (35, 4, 12)]
    F.cross_entropy(output.logits.flatten(0, 1), text(seed=1).flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_embedding_and_output_are_one_tensor():
    model = small(Dropouts.none())
    assert [n for n, p in model.named_parameters() if p.shape == (60, 12)] == ["embedding.weight"]
    nn.init.normal_(model.output_bias)
    output = model(text())
    assert torch.allclose(output.logits, output.dropped @ model.embedding.weight.T + model.output_bias, atol=1e-6)
    model.zero_grad()
    model(torch.zeros_like(text())).logits.square().sum().backward()
    assert model.embedding.weight.grad[1:].any(1).all()  # as output, for words that were not read


def test_the_state_is_carried_from_window_to_window():
    model = small(Dropouts.none()).eval()
    tokens = text(time=70)
    with model.fresh(batch=4):
        at_once = model(tokens).logits
    in_two = torch.cat([model(tokens[:35]).logits, model(tokens[35:]).logits])
    assert torch.allclose(in_two, at_once, atol=1e-5)
    model.reset(4)
    assert not torch.allclose(model(tokens[35:]).logits, at_once[35:], atol=1e-3)


def test_the_state_is_detached():
    model = small()
    for _ in range(2):
        model(text()).logits.sum().backward()  # would go back into a freed graph
    assert not any(x.requires_grad for x in state(model))
    assert {len(layer.hidden[0]) for layer in model.carry()} == {4}


def test_reset_gives_zeros_of_the_batch_size():
    model = small()
    model(text())
    assert all(x.any() for x in state(model))
    model.reset(2)
    assert [tuple(x.shape) for x in state(model)] == [(1, 2, 20)] * 4 + [(1, 2, 12)] * 2
    assert not any(x.any() for x in state(model))


def test_another_batch_size_is_refused():
    model = small()
    model(text(batch=4))
    with pytest.raises(
        ValueError, match=r"batch size 2, and the carried state has 4: .* reset\(2\), or evaluate within fresh\(2\)"
    ):
        model(text(batch=2))


def test_fresh_leaves_the_trainings_state_alone():
    model = small()
    model(text())
    before = state(model)
    with model.fresh(batch=2):
        assert not any(x.any() for x in state(model))
        model(text(batch=2))
        with torch.inference_mode(), model.fresh(batch=1):
            model(text(batch=1))
        assert model.carry()[0].hidden.shape[1] == 2
    assert same(state(model), before)
    with pytest.raises(RuntimeError, match="stop"), model.fresh(batch=2):
        raise RuntimeError("stop")
    assert same(state(model), before)
    model(text())


@pytest.mark.parametrize("batch", [None, 2, 4])
def test_a_resumed_run_goes_on_to_the_bit(batch):
    model = small()
    for step in range(3):
        train_on(model, text(seed=step), step)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    losses = [train_on(model, text(seed=step), step) for step in range(3, 6)]

    resumed = small()
    if batch is not None:  # the state is of another run, and of another batch size
        resumed(text(batch=batch))
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert [train_on(resumed, text(seed=step), step) for step in range(3, 6)] == losses
    assert same(state(resumed), state(model))


def test_the_state_is_restored_inside_another_module_and_in_a_copy():
    model = nn.Sequential(small())
    model(text())
    other = nn.Sequential(small())
    other.load_state_dict(model.state_dict())
    assert same(state(other[0]), state(model[0]))
    assert same(state(copy.deepcopy(model)[0]), state(model[0]))


def test_a_saved_state_is_not_changed_by_what_follows():
    model = small()
    model(text())
    saved, other = model.state_dict(), small().state_dict()
    before = state(model)
    model(text())
    model.load_state_dict(other)
    assert same([saved[name] for name in saved if name.startswith(("hidden", "cell"))], before)


def test_a_state_of_other_layers_is_refused():
    model = small(units=24)
    model(text())
    with pytest.raises(RuntimeError, match=r"size mismatch for hidden_0"):
        small().load_state_dict(model.state_dict())


def test_dropout_is_on_in_training_and_off_in_evaluation():
    model, plain = small(), small(Dropouts.none())
    plain.load_state_dict(model.state_dict())

    def logits(model):
        with model.fresh(batch=4):
            return model(text()).logits

    assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(model.eval()), logits(plain))
    assert torch.equal(logits(plain), logits(plain.eval()))


def test_masks_come_from_the_global_generator_and_only_where_something_is_dropped():
    model, plain = small(), small(Dropouts.none())

    def seeded(model):
        torch.manual_seed(3)
        with model.fresh(batch=4):
            return model(text()).logits, torch.get_rng_state()

    assert torch.equal(seeded(model)[0], seeded(model)[0])
    untouched = torch.manual_seed(3).get_state()
    assert torch.equal(seeded(plain)[1], untouched)
    assert torch.equal(seeded(model.eval())[1], untouched)


def test_masks_are_constant_over_time():
    dropout = only(input=0.4, layer=0.25, output=0.6)
    model = small(dropout, embedding=100, units=200)
    output, inputs, _ = seen_by_lstms(model, text(batch=8))
    for x, p in zip([*inputs, output.dropped], (0.4, 0.25, 0.25, 0.6), strict=True):
        dropped = x == 0
        assert torch.equal(dropped, dropped[:1].expand_as(dropped))
        assert dropped.float().mean().item() == pytest.approx(p, abs=0.06)
        assert not torch.equal(dropped[0, 0], dropped[0, 1])  # each text of the batch has its own mask
    kept = output.dropped != 0
    assert torch.allclose(output.dropped[kept], output.raw[kept] / (1 - 0.6))
    assert (output.raw != 0).all()


def test_embedding_dropout_removes_whole_words_everywhere():
    model = small(only(embedding=0.1), words=2000)
    tokens = torch.arange(2000).repeat(2).view(20, 200)
    _, (x, *_), _ = seen_by_lstms(model, tokens)
    first, again = x.flatten(0, 1).view(2, 2000, 12)
    assert torch.equal(first, again)
    gone = (first == 0).all(1)
    assert torch.equal(gone, (first == 0).any(1))
    assert gone.float().mean().item() == pytest.approx(0.1, abs=0.03)
    assert torch.allclose(first[~gone], model.embedding.weight[~gone] / 0.9)


def test_weight_drop_removes_half_of_the_recurrent_weights_and_trains_the_raw_ones():
    model = small(only(weight=0.5), units=40)
    raw = [lstm.weight_hh_l0 for lstm in model.lstms]
    values = [w.detach().clone() for w in raw]
    output, _, used = seen_by_lstms(model, text())
    output.logits.square().sum().backward()
    assert all(lstm.weight_hh_l0 is w for lstm, w in zip(model.lstms, raw, strict=True))
    assert same(raw, values)
    for dropped, w in zip(used, raw, strict=True):
        gone = dropped == 0
        assert gone.float().mean().item() == pytest.approx(0.5, abs=0.05)
        assert torch.equal(dropped[~gone], 2 * w[~gone])
        assert isinstance(w, nn.Parameter)
        assert torch.equal(w.grad == 0, gone)
    again = seen_by_lstms(model, text())[2]
    assert not torch.equal(again[0], used[0])


def test_regularisation_by_hand():
    raw = torch.tensor([[[1.0, 2.0]], [[2.0, 0.0]], [[2.0, 3.0]]])
    dropped = torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]], [[4.0, 0.0]]])
    output = Output(logits=raw, dropped=dropped, raw=raw)
    activation, slowness = (4 + 16 + 16) / 6, (1 + 4 + 0 + 9) / 4
    assert regularisation(output).item() == pytest.approx(2 * activation + slowness)
    assert regularisation(output, alpha=0.5, beta=3.0).item() == pytest.approx(0.5 * activation + 3 * slowness)
    one_step = Output(*(x[:1] for x in output))
    assert regularisation(one_step).item() == pytest.approx(2 * 2.0)  # and not NaN, the mean of nothing


@pytest.mark.slow
def test_training_lowers_the_loss():
    model = small(Dropouts.none())
    losses = [train_on(model, text(seed=0), step) for step in range(40)]
    assert losses[-1] < 0.98 * losses[0]
