"""The paper's networks on batches of all four data sets: the real ones where they are, else files of their form."""

import numpy as np
import pytest
import torch
from conftest import REAL

from cprop.optimizers.settings import Settings
from cprop_lab import workloads
from cprop_lab.experiments import EXPERIMENTS, PRESETS
from cprop_lab.run.names import CPROP_DEFAULTS
from cprop_lab.run.recipes import RECIPES
from cprop_lab.run.specification import Specification
from cprop_lab.run.training import Training
from cprop_lab.workloads import data

CLASSES = {"fmnist": 10, "cifar100": 100, "tiny-imagenet": 200, "ptb-gpt": 50}


@pytest.mark.parametrize(
    "workload", [pytest.param(w, marks=() if w == "fmnist-cnn" else pytest.mark.slow) for w in workloads.WORKLOADS]
)
@pytest.mark.parametrize("optimizer", ["sgd", "cprop-adam"])
def test_one_step_on_real_batches(workload, optimizer, data_root):
    size = 32 if workload.startswith(("fmnist", "ptb")) else 4
    settings = {"fused": False}
    training = Training(Specification(workload, optimizer, lr=1e-4, batch_size=size, examples=2, settings=settings))
    # Matrices and kernels: a bias before a batch norm has no gradient but rounding.
    weights = [p for p in training.model.parameters() if p.ndim > 1]
    before = [p.detach().clone() for p in weights]
    training.advance(1)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    row = training.evaluate()
    chance = np.log(next((n for name, n in CLASSES.items() if workload.startswith(name)), 10_000 if REAL else 51))
    assert row["train_loss"] == pytest.approx(chance, rel=0.5)
    assert ("mean_scale" in row) == optimizer.startswith("cprop")


@pytest.mark.parametrize(
    ("source", "channels", "size"), [(data.FASHION_MNIST, 1, 28), (data.CIFAR100, 3, 32), (data.TINY_IMAGENET, 3, 64)]
)
def test_images_are_those_of_the_files(source, channels, size, data_root):
    from datasets import load_dataset

    images, labels = data.images(source, False, channels)
    split = "validation" if source is data.TINY_IMAGENET else "test"
    rows = load_dataset(str(data_root / source.folder), split=split)
    assert images.shape == (len(rows), channels, size, size)
    assert images.dtype == torch.uint8
    for i in (0, 7, len(rows) - 1):
        expected = np.asarray(rows[i][source.image].convert("L" if channels == 1 else "RGB"))
        assert np.array_equal(images[i].permute(1, 2, 0).squeeze().numpy(), expected)
        assert labels[i] == rows[i][source.label]


def test_decoded_once(data_root, monkeypatch):
    data._images.cache_clear()
    first, _ = data.images(data.FASHION_MNIST, False, 1)
    data._images.cache_clear()
    monkeypatch.setattr(np, "stack", None)  # a second process finds what the first has decoded
    second, _ = data.images(data.FASHION_MNIST, False, 1)
    assert torch.equal(first, second)
    data._images.cache_clear()


def test_fashion_mnist_is_not_preprocessed(data_root):
    task = workloads.build("fmnist-fc", {})
    raw = task.take(task.data()[0], torch.arange(4))
    images, labels = task.prepare(raw, training=True)
    assert torch.equal(images, raw[0].float() / 255)
    assert torch.equal(labels, raw[1])


@pytest.mark.parametrize(("workload", "padding"), [("cifar100-vgg", 4), ("tiny-imagenet-resnet", 8)])
def test_crops_flips_and_normalisation(workload, padding, data_root):
    """An image whose pixels all differ shows where each one went: shifted by at most the padding, maybe flipped."""
    task = workloads.build(workload, {})
    size = 32 if workload.startswith("cifar") else 64
    image = (torch.arange(size * size) % 251 + 1).byte().view(1, 1, size, size).expand(200, 3, -1, -1)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    still, _ = task.prepare((image, torch.zeros(200)), training=False)
    torch.testing.assert_close(still[0], (image[0].float() / 255 - mean) / std)
    torch.manual_seed(0)
    moved, _ = task.prepare((image, torch.zeros(200)), training=True)
    pixels = ((moved * std + mean) * 255).round().long()[:, 0]
    padded = torch.nn.functional.pad(image[0, 0].long(), (padding,) * 4)
    places = {}
    for flip in (False, True):
        for y in range(2 * padding + 1):
            for x in range(2 * padding + 1):
                crop = padded[y : y + size, x : x + size]
                places[(crop.flip(1) if flip else crop).numpy().tobytes()] = (flip, y, x)
    found = [places[one.numpy().tobytes()] for one in pixels]  # a KeyError: not a crop of the padded image
    flips, ys, xs = zip(*found, strict=True)
    assert 60 < sum(flips) < 140
    assert (min(ys), max(ys), min(xs), max(xs)) == (0, 2 * padding, 0, 2 * padding)


def test_penn_treebank_is_cut_as_the_appendix_says(data_root):
    task = workloads.build("ptb-lstm", {})
    training, test = task.data()
    tokens, words = data.text(data.PENN_TREEBANK, True)
    lines = (data_root / "penn_treebank" / "ptb.train.txt").read_text().splitlines()
    assert len(tokens) == sum(len(line.split()) + 1 for line in lines)
    assert [words[i] for i in tokens[:5]] == lines[0].split()[:5]
    assert training.tokens.shape == (len(tokens) // 32, 32)
    assert torch.equal(training.tokens[:, 1], tokens[len(tokens) // 32 :][: len(tokens) // 32])
    inputs, targets = training[0]
    assert inputs.shape == targets.shape == (35, 32)
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(training[1][0][0], targets[-1])
    assert sum(len(test[i][0]) for i in range(len(test))) == len(test.tokens) - 1
    if REAL:
        assert (len(tokens), len(words)) == (929_589, 10_000)


@pytest.mark.slow
def test_the_text_goes_on_where_it_was_and_starts_over(data_root):
    """Windows follow each other, the state is forgotten at the text's start, and an evaluation leaves it alone."""
    run = Specification("ptb-lstm", "sgd", lr=1e-3, iterations=3, examples=1, settings={"fused": False})
    training = Training(run)
    order = training._order
    assert order.flatten().tolist() == list(range(len(training.training_data)))
    seen = []
    training.task.before_forward = lambda model, position: seen.append(position)
    training.step = len(order) - 1
    training.advance(2)
    assert seen == [len(order) - 1, 0]
    state = {name: b.clone() for name, b in training.model.named_buffers()}
    assert state["hidden_0"].shape[1] == 32
    training.evaluate()
    assert all(torch.equal(b, state[name]) for name, b in training.model.named_buffers())


@pytest.mark.slow
def test_gradients_are_clipped(data_root):
    training = Training(Specification("ptb-lstm", "sgd", lr=1e-9, iterations=1, settings={"fused": False}))
    training.advance(1)
    norm = torch.stack([p.grad.norm() for p in training.model.parameters()]).norm()
    assert norm <= 0.25 * (1 + 1e-4)


def test_the_papers_settings():
    run = Specification("fmnist-fc", "sgd", lr=0.1)
    resolved = {name: run.replace(optimizer=name).resolved_settings() for name in RECIPES.own}
    assert resolved["adam"] == resolved["amsgrad"] == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "fused": True}
    assert resolved["rmsprop"] == {"alpha": 0.99, "eps": 1e-8}
    scaled = run.replace(optimizer="cprop-sgd").resolved_settings()
    assert {k: scaled[k] for k in scaled if k.startswith("cprop_")} == {
        "cprop_beta": 0.999,
        "cprop_c": 1.0,
        "cprop_eps": 0.0,
        "cprop_measure": "normal",
    }
    papers = EXPERIMENTS["fmnist-fc"].only(["sgd"]).specifications(PRESETS["paper"], {})
    assert [one.resolved_settings()["cprop_eps"] for one in papers if one.optimizer_name.cprop] == [1e-8] * 3


def test_what_cprop_is_not_told_is_as_in_the_library():
    for name, default in Settings()._asdict().items():
        assert CPROP_DEFAULTS.get(name, default) == default


def test_a_folder_without_the_data_set_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(data.ENVIRONMENT, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"fashion_mnist is not there: CPROP_LAB_DATA .* is downloaded"):
        data.FASHION_MNIST.address()
    monkeypatch.delenv(data.ENVIRONMENT)
    assert data.FASHION_MNIST.address() == "zalando-datasets/fashion_mnist"


def test_options_that_a_workload_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"fmnist-fc does not take the options {'dropout': 0.3}"):
        workloads.build("fmnist-fc", {"dropout": 0.3})


def test_a_comparison_evaluates_as_many_windows_as_the_scoreboard():
    """All of the text, as the default for images would, takes minutes."""
    for name in ("ptb-gpt", "ptb-transformer", "ptb-lstm-small"):
        assert workloads.build(name, {}).examples == PRESETS["reduced"].lengths[name].examples
