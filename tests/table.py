"""The table of optimizers, settings and inputs for the generic tests."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch.optim import Optimizer

import cprop

DEVICE = torch.device(os.environ.get("CPROP_TEST_DEVICE", "cpu"))
"""Where parameters are, as ``pytest --device`` says."""


def adabound_reference(params, *, amsbound=False, decoupled_weight_decay=False, **kwargs):
    """pytorch_optimizer's AdaBound with the argument names of the original; torch has no AdaBound."""
    return pytorch_optimizer.AdaBound(
        params, ams_bound=amsbound, weight_decouple=decoupled_weight_decay, foreach=False, **kwargs
    )


def adam_reference(params, *, decoupled_weight_decay=False, **kwargs):
    """torch's Adam; with decoupled decay its AdamW, because Adam has that argument only from torch 2.7 on."""
    return (torch.optim.AdamW if decoupled_weight_decay else torch.optim.Adam)(params, **kwargs)


@dataclass(frozen=True)
class Native:
    """A native optimizer, its plain counterpart, and arguments for both."""

    cls: type[Optimizer]
    plain: Callable[..., Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self):
        parts = [f"{k}={v}" for k, v in self.settings.items() if k != "lr"]
        return "-".join([self.cls.__name__, *parts])

    @property
    def decouples(self):
        return bool(self.settings.get("weight_decay", 0.01 if self.cls is cprop.CPropAdamW else 0)) and (
            self.cls is cprop.CPropAdamW or self.settings.get("decoupled_weight_decay", False)
        )


def natives(cls, plain, lr, *variants):
    return [Native(cls, plain, {"lr": lr, **variant}) for variant in ({}, *variants)]


L2 = {"weight_decay": 0.1}
NATIVES = [
    *natives(
        cprop.CPropSGD,
        torch.optim.SGD,
        0.05,
        L2,
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, **L2},
        {"momentum": 0.9, "nesterov": True, **L2},
        {"maximize": True, **L2},
    ),
    *natives(
        cprop.CPropAdam,
        adam_reference,
        0.01,
        L2,
        {"betas": (0.8, 0.99)},
        {"amsgrad": True, **L2},
        {"maximize": True, **L2},
        {"decoupled_weight_decay": True, **L2},
    ),
    *natives(cprop.CPropAdamW, torch.optim.AdamW, 0.01, L2, {"weight_decay": 0.0}, {"amsgrad": True, "maximize": True}),
    *natives(
        cprop.CPropRMSprop,
        torch.optim.RMSprop,
        0.01,
        L2,
        {"momentum": 0.9, **L2},
        {"centered": True, "momentum": 0.5, **L2},
        {"alpha": 0.999},
        {"maximize": True, **L2},
    ),
    *natives(
        cprop.CPropAdaBound,
        adabound_reference,
        0.01,
        L2,
        {"amsbound": True, **L2},
        {"maximize": True, **L2},
        {"decoupled_weight_decay": True, **L2},
    ),
]


@dataclass(frozen=True)
class Inner:
    """An optimizer to wrap."""

    cls: type[Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self):
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.settings.items() if k != "lr")])


INNERS = [
    Inner(torch.optim.SGD, {"lr": 0.05}),
    Inner(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, **L2}),
    Inner(torch.optim.Adam, {"lr": 0.01, "amsgrad": True, **L2}),
    Inner(torch.optim.AdamW, {"lr": 0.01, **L2}),
    Inner(torch.optim.NAdam, {"lr": 0.01}),
    Inner(torch.optim.RAdam, {"lr": 0.01}),
    Inner(torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    Inner(torch.optim.Adagrad, {"lr": 0.05}),
    Inner(torch.optim.Adamax, {"lr": 0.01}),
    Inner(torch.optim.Adadelta, {"lr": 1.0}),
    Inner(torch.optim.ASGD, {"lr": 0.05}),
    Inner(pytorch_optimizer.Lion, {"lr": 0.005, "foreach": False}),  # not every torch has foreach for a DTensor
]


@dataclass(frozen=True)
class Entry:
    """Any optimizer of this package, for the generic tests."""

    id: str
    build: Callable[..., Optimizer]
    cls: type[Optimizer]
    settings: dict[str, Any]


def wrapped(inner: Inner) -> Entry:
    def build(params, **settings):
        return cprop.CProp.around(inner.cls)(params, **inner.settings, **settings)

    return Entry(f"CProp-{inner.id}", build, inner.cls, inner.settings)


def native(info: Native) -> Entry:
    def build(params, **settings):
        return info.cls(params, **info.settings, **settings)

    return Entry(info.id, build, info.cls, info.settings)


ROUNDED = native(Native(cprop.CPropAdamW, torch.optim.AdamW, {"lr": 0.01, "cprop_stochastic_rounding": True}))
"""One that rounds bfloat16 parameters stochastically, as the wrapper does. Not in ``NATIVES``: plain AdamW cannot."""

TABLE = [*map(native, NATIVES), ROUNDED, *map(wrapped, INNERS)]


def cases(rows, repeats=pytest.mark.nightly):
    """Parameters of a test: one row per class, that with the most settings, and the others with a mark.

    Where the library has one class for all, the wrapper, SGD and AdamW stand for the other optimizers in a quick run.

    Args:
        rows: rows of :data:`NATIVES`, :data:`INNERS` or :data:`TABLE`.
        repeats: the mark of the others. They show the same again, unless the settings are what is tested; then they
            are ``slow``.
    """
    fullest = {}
    for row in rows:
        fullest[row.cls] = max(fullest.get(row.cls, row), row, key=lambda row: len(row.settings))

    def marks(row):
        if row is not fullest[row.cls]:
            return repeats
        quick = row.cls in (torch.optim.SGD, torch.optim.AdamW) or row.cls.__module__.startswith("cprop")
        return () if quick else pytest.mark.slow

    return [pytest.param(row, id=row.id, marks=marks(row)) for row in rows]


def inputs(dtype=torch.float32):
    """Parameters of every shape and layout that a model may have."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)  # the same on every device

    return [
        torch.nn.Parameter(tensor)
        for tensor in (
            normal(),
            normal(5),
            normal(4, 3),
            normal(3, 4).t(),
            normal(2, 3, 4, 4).to(memory_format=torch.channels_last),
            normal(0),
        )
    ]


def gradients(params, step, noise=2.0):
    """A signal that depends on the parameters, plus noise that is the same for every optimizer.

    The signal is bounded, so that ``maximize`` does not diverge.
    """
    generator = torch.Generator().manual_seed(step)
    for p in params:
        jitter = torch.randn(p.shape, generator=generator).to(p)
        p.grad = p.detach().tanh().add_(jitter, alpha=noise)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        gradients(params, step)
        optimizer.step()
    return params


WAYS = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def prefixed(entry, way):
    """Our flags by the wrapper's names, where the entry is a wrapper."""
    return {f"cprop_{k}" if entry.id.startswith("CProp-") else k: v for k, v in way.items()}


NATIVE_CLASSES = [cprop.CPropSGD, cprop.CPropAdam, cprop.CPropAdamW, cprop.CPropRMSprop, cprop.CPropAdaBound]
BUILDS = [*NATIVE_CLASSES, cprop.CProp.around(torch.optim.Adam)]

every_optimizer = pytest.mark.parametrize("entry", cases(TABLE))
every_setting = pytest.mark.parametrize("entry", cases(TABLE, pytest.mark.slow))
every_inner = pytest.mark.parametrize("inner", cases(INNERS))
every_way = pytest.mark.parametrize("way", WAYS)
every_build = pytest.mark.parametrize("build", BUILDS, ids=lambda cls: cls.__name__)
# Compiled, one native stands for the others: each of them is another kernel.
every_build_in_every_way = pytest.mark.parametrize(
    ("build", "way"),
    [
        pytest.param(build, way, id=f"{build.__name__}-{way}", marks=pytest.mark.nightly if repeats else ())
        for build in BUILDS
        for way in WAYS
        for repeats in [way == "fused" and build in NATIVE_CLASSES and build is not cprop.CPropAdam]
    ],
)


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
