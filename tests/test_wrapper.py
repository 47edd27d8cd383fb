"""Around any optimizer: groups and state of both, what cannot be wrapped, and the traps of torch.optim."""

import copy
import inspect
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import MutableMapping

import pytest
import pytorch_optimizer
import schedulefree
import torch
from table import (
    Inner,
    every_inner,
    gradients,
    inputs,
    same,
    through_a_file,
    train,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import cprop
from cprop.optimizers.settings import Settings

# --- the groups and the state of the inner optimizer ----------------------------------------------


@every_inner
def test_wrapper_and_inner_cannot_drift_apart(inner):
    params = inputs()
    optimizer = cprop.CProp(inner.cls(params, **inner.settings))
    train(optimizer, params, 3)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert optimizer.param_groups is optimizer.inner.param_groups
    # The fault that this is about: the learning rate of a loaded optimizer must still be obeyed.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1, start=3)
    if inner.cls is not torch.optim.ASGD:  # it keeps a learning rate of its own in its state
        assert same(params, before)
    # And someone may load the inner optimizer behind the wrapper's back.
    optimizer.inner.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.param_groups is optimizer.inner.param_groups


def test_a_group_that_is_added_to_the_inner_optimizer_gets_the_settings():
    params = inputs()
    optimizer = cprop.CProp(torch.optim.SGD(params[:2], lr=0.1), c=2.0, fused=False)
    optimizer.inner.add_param_group({"params": params[2:], "cprop_beta": 0.9})
    train(optimizer, params, 2)
    added = optimizer.param_groups[1]
    assert (added["cprop_c"], added["cprop_beta"], added["cprop_fused"]) == (2.0, 0.9, False)
    assert optimizer.state[params[3]]["cprop_step"] == 2


def test_a_checkpoint_loaded_into_the_inner_optimizer():
    params = inputs()
    plain = torch.optim.Adam(params, lr=0.5)
    train(plain, params, 3)
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.1))
    optimizer.param_groups[0]["cprop_c"] = 2.0
    train(optimizer, params, 4)
    saved = through_a_file(optimizer.state_dict())
    optimizer.inner.load_state_dict(through_a_file(plain.state_dict()))
    train(optimizer, params, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cprop_c"]) == (0.5, 2.0)
    assert optimizer.state[params[1]]["step"] == 4
    assert optimizer.state[params[1]]["cprop_step"] == 5  # the gradients that it has seen
    # CProp's own checkpoint brings its statistics, which do not stay with the inner optimizer.
    optimizer.inner.load_state_dict(saved)
    assert optimizer.state[params[1]]["cprop_step"] == 4
    assert set(optimizer.inner.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_statistics_that_the_inner_optimizer_rounded_are_refused():
    params = inputs(torch.bfloat16)
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.1))
    train(optimizer, params, 300)
    saved = through_a_file(optimizer.state_dict())
    optimizer.inner.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"into its inner optimizer, Adam, which rounded .* to torch.bfloat16: load"):
        train(optimizer, params, 1)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1)
    assert optimizer.state[params[1]]["cprop_step"] == 301


def test_wrapping_again_continues_with_new_settings():
    params = inputs()
    first = cprop.CProp(torch.optim.SGD([{"params": params, "cprop_eps": 1e-6}], lr=0.1), c=2.0)
    train(first, params, 3)
    second = cprop.CProp(first.inner, c=5.0, measure="logistic")
    group = second.param_groups[0]
    assert (group["cprop_c"], group["cprop_measure"], group["cprop_eps"]) == (5.0, "logistic", 1e-6)
    train(second, params, 1)
    assert second.state[params[1]]["cprop_step"] == 4


def test_a_parameter_that_is_listed_twice_is_observed_and_scaled_once():
    once, twice = inputs()[1:2], inputs()[1:2]
    optimizer = cprop.CProp(torch.optim.SGD(once, lr=0.2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        doubled = cprop.CProp(torch.optim.SGD(twice * 2, lr=0.1))
    train(optimizer, once, 10)
    train(doubled, twice, 10)
    torch.testing.assert_close(once, twice)
    assert doubled.state[twice[0]]["cprop_step"] == 10
    assert dict(doubled.scales())[twice[0]].max() < 1


# --- the state of the wrapper ---------------------------------------------------------------------


def adam_in_a_wrapper():
    params = inputs()
    optimizer = cprop.CProp(torch.optim.Adam(params, lr=0.01))
    train(optimizer, params[:3], 2)
    return optimizer, params


ADAMS, OURS = ["step", "exp_avg", "exp_avg_sq"], ["cprop_step", "cprop_m", "cprop_v"]


def test_state_is_a_mapping_of_both_parts():
    optimizer, params = adam_in_a_wrapper()
    state = optimizer.state
    assert state is optimizer.state
    assert isinstance(state, MutableMapping)
    assert isinstance(state[params[0]], MutableMapping)
    assert [len(state), bool(state), params[0] in state, params[3] in state] == [3, True, True, False]
    assert [p is q for p, q in zip(state, params, strict=False)] == [True] * 3
    assert list(state[params[0]]) == list(state[params[0]].keys()) == [*ADAMS, *OURS]
    assert list(optimizer.inner.state[params[0]]) == ADAMS
    assert state.get(params[3]) is None
    assert len(state[params[3]]) == 0
    assert params[3] not in state
    with pytest.raises(KeyError, match="cprop_a"):
        state[params[0]]["cprop_a"]
    assert repr(state[params[0]]) == repr({**optimizer.inner.state[params[0]], **dict(state[params[0]])})


def test_what_is_written_to_the_state_goes_where_it_belongs():
    optimizer, params = adam_in_a_wrapper()
    p, q = params[0], params[4]
    optimizer.state[p]["cprop_step"].fill_(7)
    optimizer.state[p].update(tag=1, cprop_note="ours")
    optimizer.state[q]["tag"] = 2
    assert (optimizer.inner.state[p]["tag"], optimizer.inner.state[q]) == (1, {"tag": 2})
    assert "cprop_note" not in optimizer.inner.state[p]
    assert optimizer.state[p].pop("cprop_note") == "ours"
    del optimizer.state[p]["tag"], optimizer.state[q]
    assert q not in optimizer.inner.state
    assert list(optimizer.state[p]) == [*ADAMS, *OURS]
    for each, entries in optimizer.state.items():  # as tools move state to a device
        for key, value in entries.items():
            entries[key] = value
        optimizer.state[each] = {key: copy.copy(value) for key, value in entries.items()}
    train(optimizer, params, 1, start=2)
    assert (optimizer.state[p]["cprop_step"], optimizer.state[p]["step"]) == (8, 3)
    assert optimizer.state.setdefault(params[5], {}) == optimizer.state[params[5]]
    saved = optimizer.state.pop(p)
    assert [*saved] == [*ADAMS, *OURS]
    assert p not in optimizer.inner.state
    train(optimizer, params, 1, start=3)
    assert optimizer.state[p]["cprop_step"] == optimizer.state[p]["step"] == 1


@pytest.mark.parametrize(
    "reset",
    [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
        lambda optimizer: [optimizer.state.popitem() for _ in list(optimizer.state)],
    ],
    ids=["clear", "rebind", "pop", "popitem"],
)
def test_a_reset_of_the_state_resets_both(reset):
    optimizer, params = adam_in_a_wrapper()
    reset(optimizer)
    assert not optimizer.state
    assert not optimizer.inner.state
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["cprop_step"] == optimizer.state[params[0]]["step"] == 1


def test_copies_of_the_state_are_dictionaries():
    optimizer, params = adam_in_a_wrapper()
    for twin, twins in (
        copy.deepcopy((optimizer.state, params)),
        pickle.loads(pickle.dumps((optimizer.state, params))),
        (optimizer.state.copy(), params),
    ):
        assert type(twin) is defaultdict
        assert type(twin[twins[1]]) is dict
        assert list(twin[twins[1]]) == [*ADAMS, *OURS]
    twin = optimizer.state.copy()
    train(optimizer, params, 1, start=2)
    optimizer.state = twin
    train(optimizer, params, 1, start=3)
    assert optimizer.state[params[0]]["cprop_m"] is twin[params[0]]["cprop_m"]
    optimizer.state = optimizer.state  # what a tool does to every optimizer
    assert list(optimizer.state[params[0]]) == [*ADAMS, *OURS]


class StrictSGD(torch.optim.SGD):
    """Initializes its state if that is empty, as a whole and of each parameter."""

    def step(self, closure=None):
        if not self.state:
            self.started = self.__dict__.get("started", 0) + 1
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["steps"] = 0
            self.state[p]["steps"] += 1
            assert list(self.state[p]) == ["steps"]


def test_an_inner_optimizer_sees_its_own_state_only():
    params = inputs()
    optimizer = cprop.CProp(StrictSGD(params))
    optimizer.state[params[1]]["cprop_note"] = 1
    train(optimizer, params, 3)
    assert optimizer.inner.started == 1
    assert next(iter(optimizer.state[params[1]])) == "steps"
    assert optimizer.state[params[1]]["cprop_note"] == 1


def test_a_wrapper_that_was_pickled_when_its_statistics_were_in_the_inner_state():
    optimizer, _ = adam_in_a_wrapper()
    old = {"inner": optimizer.inner, "defaults": optimizer.defaults}
    for p, entries in optimizer.state.copy().items():
        optimizer.inner.state[p] = entries
    del optimizer.inner._cprop
    restored = cprop.CProp.__new__(cprop.CProp)
    restored.__setstate__(pickle.loads(pickle.dumps(old)))
    p = restored.param_groups[0]["params"][0]
    assert list(restored.state[p]) == [*ADAMS, *OURS]
    assert list(restored.inner.state[p]) == ADAMS


@every_inner
def test_inner_optimizer_starts_as_it_would_alone(inner):
    # Many initialise on len(state) == 0: ours must not lie there before.
    ours, theirs = inputs(), inputs()
    optimizer, plain = cprop.CProp(inner.cls(ours, **inner.settings)), inner.cls(theirs, **inner.settings)
    train(optimizer, ours, 2)
    train(plain, theirs, 2)
    for a, b in zip(ours, theirs, strict=True):
        theirs_keys = set(plain.state.get(b, {}))
        assert {key for key in optimizer.state[a] if not key.startswith("cprop_")} == theirs_keys


def test_inner_optimizer_may_be_in_mid_training():
    params = inputs()
    inner = torch.optim.Adam(params, lr=0.01)
    train(inner, params, 10)
    optimizer = cprop.CProp(inner)
    train(optimizer, params, 5, start=10)
    assert optimizer.state[params[1]]["step"] == 15
    assert optimizer.state[params[1]]["cprop_step"] == 5


# --- what cannot be wrapped, and what is to no purpose --------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda ps: cprop.CProp(torch.optim.LBFGS(ps)),
            r"LBFGS evaluates its closure many times .* one gradient per step",
        ),
        (lambda ps: cprop.CProp(ps), r"CProp wraps an optimizer, but got list: write CProp\(torch\.optim\.Adam"),
        (lambda ps: cprop.CProp(cprop.CPropSGD(ps)), r"CPropSGD is already scaled by CProp: wrap the plain optimizer"),
        (lambda ps: cprop.CProp(cprop.CProp(torch.optim.SGD(ps))), r"CProp is already scaled by CProp"),
        (
            lambda ps: cprop.CProp(schedulefree.AdamWScheduleFree(ps)),
            r"AdamWScheduleFree uses different weights for training and evaluation.* wrap the optimizer it is based",
        ),
        (
            lambda ps: cprop.CProp(torch.optim.Adam(ps, differentiable=True)),
            r"Adam has differentiable=True.* set differentiable=False",
        ),
    ],
)
def test_what_cannot_be_wrapped_says_what_to_do(build, message):
    with pytest.raises(TypeError, match=message):
        build(inputs())


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def test_what_has_no_ordinary_state_dict_is_refused():
    lookahead = pytorch_optimizer.Lookahead(torch.optim.SGD(linear().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Lookahead.state_dict\(\) has \[.*\] instead of 'state' and 'param_groups'"):
        cprop.CProp(lookahead)


def test_the_loss_of_a_closure_reaches_the_inner_optimizer():
    model = linear()
    optimizer = cprop.CProp(pytorch_optimizer.AliG(model.parameters(), max_lr=0.1))
    inputs_ = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(inputs_).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(20):
        optimizer.step(closure)
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]


def test_sam_goes_around_cprop_and_not_inside_it():
    model = linear()

    def closure():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    closure()
    around = cprop.CProp(pytorch_optimizer.SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.1))
    with pytest.raises(
        RuntimeError, match=r"wrap its base optimizer instead, as in SAM\(params, base_optimizer=CProp\.around\("
    ):
        around.step(closure)
    model = linear()
    inside = pytorch_optimizer.SAM(model.parameters(), base_optimizer=cprop.CProp.around(torch.optim.Adam), lr=0.1)
    first = closure().item()
    for _ in range(10):
        inside.step(closure)
    assert closure().item() < 0.5 * first
    assert all("cprop_m" in state for state in inside.base_optimizer.state.values())


def test_weights_kept_in_the_state_are_warned_of_once():
    params = inputs()[1:3]
    optimizer = cprop.CProp(pytorch_optimizer.MADGRAD(params, lr=0.01))
    with pytest.warns(UserWarning, match=r"MADGRAD keeps weights in its state \('x0'\), which CProp does not scale"):
        train(optimizer, params, 1)
    train(optimizer, params, 2, start=1)  # warnings are errors here


def test_ordinary_optimizers_are_not_warned_of():
    for cls in (torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.RMSprop):
        params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4)), *inputs()]
        train(cprop.CProp(cls(params, lr=0.01)), params, 1)


L2 = {"weight_decay": 0.01}


@pytest.mark.parametrize("size", [0.0, 1e-9])
@pytest.mark.parametrize(
    ("inner", "settings", "warns"),
    [
        (torch.optim.SGD, {"momentum": 0.9, **L2}, False),
        (torch.optim.Adam, L2, False),
        (torch.optim.NAdam, L2, False),
        (torch.optim.RMSprop, {"momentum": 0.9, **L2}, False),
        (pytorch_optimizer.AdaBelief, {}, False),  # its state is constant then
        (pytorch_optimizer.MARS, {}, False),  # it has another name for its weight decay
        (torch.optim.ASGD, L2, True),
        (pytorch_optimizer.MADGRAD, L2, True),
        (pytorch_optimizer.Ranger, L2, True),  # Lookahead
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_layer_whose_first_gradient_is_zero_tells_weights_from_their_decay(inner, settings, warns, size, recwarn):
    """As behind a zero-initialized head, and in the A of LoRA: then SGD's momentum is the L2 term alone."""
    warnings.simplefilter("always")
    w = torch.nn.Parameter(inputs()[4].detach().clone())
    gradients([w], 0)
    w.grad.mul_(size)
    cprop.CProp(inner([w], lr=1e-3, **settings)).step()
    assert any("keeps weights in its state" in str(w.message) for w in recwarn) == warns


class Quantized(torch.Tensor):
    """Supports no operation at all, as torchao's state supports few."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_state_of_any_kind_stops_no_step_and_leaves_no_weight_unscaled():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            w = self.param_groups[0]["params"][0]
            self.state[w]["quantized"] = Quantized(w)

    ours, theirs = inputs()[2:3], inputs()[2:3]
    train(cprop.CProp(Odd(ours, lr=0.1), c=0.5), ours, 1)
    train(cprop.CProp(torch.optim.SGD(theirs, lr=0.1), c=0.5), theirs, 1)
    assert torch.equal(*ours, *theirs)


# --- a class and keyword arguments ----------------------------------------------------------------


def test_around_is_a_class_that_frameworks_can_keep():
    cls = cprop.CProp.around(torch.optim.AdamW)
    assert cprop.CProp.around(torch.optim.AdamW) is cls
    assert issubclass(cls, cprop.CProp)
    assert pickle.loads(pickle.dumps(cls)) is cls
    optimizer = cls(inputs(), 0.5, weight_decay=0.1, cprop_c=3.0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cprop_c"]) == (0.5, 3.0)


class Derived(cprop.CProp.around(torch.optim.AdamW)):
    """One of a user."""


def test_a_class_derived_from_around_is_pickled_as_itself():
    assert pickle.loads(pickle.dumps(Derived)) is Derived
    optimizer, _ = pickle.loads(pickle.dumps((Derived(inputs()), 0)))
    assert type(optimizer) is Derived


def test_around_shows_the_arguments_of_both():
    names = list(inspect.signature(cprop.CProp.around(torch.optim.Adam)).parameters)
    assert names[: names.index("cprop_beta")] == list(inspect.signature(torch.optim.Adam).parameters)
    assert names[names.index("cprop_beta") :] == [*Settings._fields, "cprop_foreach", "cprop_fused"]
    with pytest.raises(TypeError, match="CPropAdam is already scaled by CProp"):
        cprop.CProp.around(cprop.CPropAdam)(inputs())


@every_inner
def test_around_equals_the_instance(inner: Inner):
    ours, theirs = inputs(), inputs()
    train(cprop.CProp.around(inner.cls)(ours, **inner.settings, cprop_beta=0.99), ours, 20)
    train(cprop.CProp(inner.cls(theirs, **inner.settings), beta=0.99), theirs, 20)
    assert same(ours, theirs)


# --- traps of torch.optim: this wrapper passes, a naive one falls into each -----------------------


class Naive(torch.optim.Optimizer):
    """Algorithm 1, formula by formula, sharing the inner optimizer's groups and state."""

    def __init__(self, optimizer, beta=0.999, c=1.0, eps=1e-8):
        super().__init__([torch.zeros(1)], dict(optimizer.defaults))
        self.inner, self.beta, self.c, self.eps = optimizer, beta, c, eps
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self, closure=None):
        before = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "cprop_m" not in state:
                        state["cprop_m"], state["cprop_v"] = torch.zeros_like(p), torch.zeros_like(p)
                        state["cprop_step"] = torch.tensor(0.0)
                    before[p] = p.clone()
        self.inner.step(closure)
        for p, start in before.items():
            g, state = p.grad, self.state[p]
            state["cprop_step"] += 1
            state["cprop_m"].mul_(self.beta).add_(g, alpha=1 - self.beta)
            state["cprop_v"].mul_(self.beta).addcmul_(g, g, value=1 - self.beta)
            correction = 1 - self.beta ** state["cprop_step"].item()
            m_hat, v_hat = state["cprop_m"] / correction, state["cprop_v"] / correction
            n = correction / (1 - self.beta)
            sigma = ((v_hat - m_hat**2).clamp_min(0) / (n - 1 + self.eps)).sqrt() + self.eps
            scale = (self.c * torch.erf(m_hat.abs() / (sigma * math.sqrt(2)))).clamp_max(1)
            p.copy_(start + scale * (p - start))

    def scales(self):
        for p, state in self.state.items():
            correction = 1 - self.beta ** state["cprop_step"].item()
            m_hat, v_hat = state["cprop_m"] / correction, state["cprop_v"] / correction
            yield p, cprop.conformity_scale(m_hat, v_hat, correction / (1 - self.beta), c=self.c, eps=self.eps)


def asking_for_a_checkpoint_changes_no_parameter(wrap):
    # 1: DCP calls step() with zero gradients and lr 0. With eps = 0 a naive scale is 0 / 0.
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, wrap(torch.optim.Adam(model.parameters()), eps=0.0))
    assert torch.equal(model.weight, before)


def a_loaded_optimizer_obeys_its_learning_rate(wrap):
    # 2: load_state_dict replaces the groups of one of the two.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 2)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1, start=2)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def a_deep_copy_trains(wrap):
    # 3: Optimizer.__getstate__ drops the inner optimizer.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 2)
    twin, twin_params = copy.deepcopy((optimizer, params))
    train(twin, twin_params, 1, start=2)


def a_pickle_trains(wrap):
    # 3: the same for pickle.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    twin, twin_params = pickle.loads(pickle.dumps((optimizer, params)))
    train(twin, twin_params, 1)


def the_inner_optimizer_finds_its_state_empty_at_first(wrap):
    # 4: Adam initialises on len(state) == 0.
    params = inputs()
    train(wrap(torch.optim.Adam(params)), params, 2)


def statistics_of_bfloat16_stay_float32_on_load(wrap):
    # 5: torch casts floating state to the parameter's dtype.
    params = inputs(torch.bfloat16)
    optimizer = wrap(torch.optim.SGD(params, lr=0.1))
    train(optimizer, params, 300)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    state = optimizer.state[params[1]]
    assert state["cprop_m"].dtype == state["cprop_v"].dtype == torch.float32
    train(optimizer, params, 5, start=300)
    assert state["cprop_step"] == 305


def statistics_are_of_the_gradient_before_the_inner_step(wrap):
    # 6: an inner optimizer may write to the gradient, as L2 decay by hand does.
    class Rude(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].grad.mul_(-100)
            super().step()

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = wrap(Rude([w], lr=0.01))
    w.grad = torch.full((3,), 2.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["cprop_m"], torch.full((3,), 0.002))


def dropping_the_gradient_is_survived(wrap):
    # 6: or set it to None.
    class Rude(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.zero_grad()

    params = inputs()
    train(wrap(Rude(params, lr=0.01)), params, 2)


def a_parameter_that_joins_late_counts_for_itself(wrap):
    # 8: no state without a gradient, and a counter a parameter: the scale of a first step is one.
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = wrap(torch.optim.Adam(params))
    train(optimizer, params[:1], 5)
    train(optimizer, params, 1, start=5)
    assert dict(optimizer.scales())[params[1]].eq(1).all()
    assert optimizer.state[params[1]]["step"] == 1


def every_element_takes_its_first_step_in_full(wrap):
    # 11: at t = 1 rounding noise is divided by eps.
    w = torch.nn.Parameter(torch.zeros(100_000))
    w.grad = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    optimizer.step()
    torch.testing.assert_close(w.detach(), -w.grad)


def small_gradients_learn_once_eps_is_lowered_in_the_groups(wrap):
    # 12: eps is absolute, and must be within reach of a running training.
    w = torch.nn.Parameter(torch.zeros(1000))
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    optimizer.param_groups[0]["cprop_eps"] = 0.0
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        w.grad = 1e-8 * (1 + torch.randn(1000, generator=generator))
        before = w.detach().clone()
        optimizer.step()
    share = (w.detach() - before).sum() / -w.grad.sum()
    assert share > 0.9


def dcp_loads_by_keyword(wrap):
    # 15: DCP calls load_state_dict(state_dict=...), and 4 again, for it makes a fresh optimizer step.
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.1))
    train(optimizer, list(model.parameters()), 3)
    twin = copy.deepcopy(model)
    resumed = wrap(torch.optim.Adam(twin.parameters(), lr=0.1))
    set_optimizer_state_dict(twin, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    train(optimizer, list(model.parameters()), 3, start=3)
    train(resumed, list(twin.parameters()), 3, start=3)
    assert torch.equal(model.weight, twin.weight)


def scale_one_is_the_inner_step_to_the_bit(wrap):
    # 16: before + 1 * (after - before) is not after.
    ours, theirs = inputs(), inputs()
    train(wrap(torch.optim.SGD(ours, lr=0.1), c=math.inf), ours, 20)
    train(torch.optim.SGD(theirs, lr=0.1), theirs, 20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def a_scheduler_steers_momentum_too(wrap):
    # OneCycleLR asks `defaults` for momentum, and sets it in the groups that the inner optimizer must read.
    params = inputs()
    optimizer = wrap(torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    gradients(params, 0)
    optimizer.step()
    scheduler.step()
    inner_group = optimizer.inner.param_groups[0]
    assert inner_group["momentum"] == optimizer.param_groups[0]["momentum"] != 0.9


TRAPS = [
    asking_for_a_checkpoint_changes_no_parameter,
    a_loaded_optimizer_obeys_its_learning_rate,
    a_deep_copy_trains,
    a_pickle_trains,
    the_inner_optimizer_finds_its_state_empty_at_first,
    statistics_of_bfloat16_stay_float32_on_load,
    statistics_are_of_the_gradient_before_the_inner_step,
    dropping_the_gradient_is_survived,
    a_parameter_that_joins_late_counts_for_itself,
    every_element_takes_its_first_step_in_full,
    small_gradients_learn_once_eps_is_lowered_in_the_groups,
    dcp_loads_by_keyword,
    scale_one_is_the_inner_step_to_the_bit,
    a_scheduler_steers_momentum_too,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_trap_is_avoided(trap):
    trap(cprop.CProp)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_naive_wrapper_falls_into_it(trap):
    with pytest.raises((AssertionError, AttributeError, KeyError, TypeError)):
        trap(Naive)
