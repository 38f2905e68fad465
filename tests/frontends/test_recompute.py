"""What is recomputed at the front doors: to the bit, and really not offloaded."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter, OrderedDict

import pytest
import torch
import torch.nn.functional as F
from programs import TWO_TIMINGS, assert_nothing_left, assert_same, make_config, make_manager
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_offload import get_act_offloading_ctx_manager, offload_modules
from megatron_offload.config import RECOMPUTE_KINDS
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.frontends.around import refuse_unserved
from megatron_offload.recompute.sites import unit_of

ROWS, WIDTH = 16, 32
OWN = "**own_norm"
NAMED = ("norm", "mlp_act", OWN)


class OwnRMSNorm(nn.Module):
    """As Hugging Face's models write it."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)


class Gated(nn.Module):
    """A layer of both kinds of norm, a gated activation, and dropout where it is asked for."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.own_norm = OwnRMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        y = self.own_norm(hidden_states=x)
        return x + self.drop(self.down(self.act(self.gate(y)) * self.up(y)))


def make_model(**settings):
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(**settings) for _ in range(3)), nn.Linear(WIDTH, 3))


def around_part(part):
    """A model in which the part has what comes before and after it saved."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(WIDTH, WIDTH), "own_norm": part(), "last": nn.Linear(WIDTH, 3)}
    return nn.Sequential(OrderedDict(parts))


def make_inputs():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model, context=None, inputs=None):
    """Return the loss and all gradients of one step."""
    torch.manual_seed(2)
    model.zero_grad()
    x = make_inputs() if inputs is None else inputs
    with context or contextlib.nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def around(model, units, timing="late", **settings):
    config = make_config(timing, recompute=units, **settings)
    return get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)


def recomputed_bytes(manager):
    return sum(group.recomputed_bytes for group in manager.last_step.by_name.values())


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_each_choice_of_units_gives_the_bits_and_more_of_them_move_less(timing):
    model = make_model()
    expected = train(model)
    moved = []
    for units in ((), ("mlp_act",), ("norm", "mlp_act"), NAMED):
        offload = around(model, units, timing, checking=True)
        for _ in range(3):
            assert_same(expected, train(model, offload))
            assert offload.end_step()
        assert (recomputed_bytes(offload.manager) > 0) is (units != ())
        moved.append(offload.last_step.offloaded_bytes)
        assert_nothing_left(offload.manager)
    assert moved == sorted(set(moved), reverse=True)


@pytest.mark.parametrize(("units", "times"), [(("norm", "mlp_act"), 3), (NAMED, 4)])
def test_all_that_named_modules_make_of_what_is_saved_leaves(units, times):
    model = make_model()
    offload = around(model, units, min_tensor_bytes=ROWS * WIDTH)
    train(model, offload)
    assert offload.end_step()
    expected = times * 3 * 4 * ROWS * WIDTH
    if OWN in units:  # what it saves itself is dropped too: its input, twice, and a root
        expected += 3 * 4 * sum((3 * ROWS * WIDTH, 2 * ROWS))
    assert recomputed_bytes(offload.manager) == expected


def test_what_was_proven_is_proven_for_the_next_context_too():
    model, proven = make_model(), []
    expected = train(model)
    for _ in range(3):
        offload = around(model, ("norm", "mlp_act"), min_tensor_bytes=64)
        assert_same(expected, train(model, offload))
        assert offload.end_step()
        proven.append(offload.last_step.proven_bytes)
        assert recomputed_bytes(offload.manager) > 0
        del offload  # a new one goes on where it was
    assert proven[0] > 0
    assert proven[1:] == [0, 0]


def group_step(model, manager, inputs=None):
    with manager.step():
        found = train(model, inputs=inputs)
    assert_nothing_left(manager)
    return found


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("units", [("norm", "*.act"), ("?.gate", "*.up")])
def test_modules_by_name_are_recomputed_where_groups_are(timing, units):
    model = make_model()
    expected = train(model)
    manager = make_manager(timing, recompute=units)
    with offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            assert_same(expected, group_step(model, manager))
        assert manager.last_step.recomputed_bytes_by_unit.keys() == set(units)
        assert recomputed_bytes(manager) > 0
    assert not any(module._forward_hooks for module in model.modules())


class Adding(nn.Module):
    def forward(self, x):
        return x.add_(1).cos()


class Sparse(nn.Module):
    """A graph's layer; its neighbours are a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("neighbours", torch.eye(ROWS).to_sparse_csr())
        self.register_buffer("others", torch.eye(ROWS).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.others, torch.sparse.mm(self.neighbours, x)).cos()


class Forces(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(place.cos().sum(), place)
        return x.sin() * force


class Counts(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def forward(self, x):
        self.calls["all"] += 1
        return super().forward(x) * self.calls["all"]


def scripted():
    return nn.Sequential(OwnRMSNorm(), torch.jit.script(nn.Sequential(nn.GELU())))


def norm_of_a_network():
    """Its weight comes anew with each call, as of a network for it, of pruning, or with dropout."""
    norm = nn.LayerNorm(WIDTH)
    norm.raw = nn.Parameter(norm.weight.detach())
    del norm._parameters["weight"]
    norm.register_forward_pre_hook(lambda n, _: setattr(n, "weight", F.dropout(n.raw, 0.5)))
    return norm


def norm():
    return nn.LayerNorm(WIDTH)


def patched_norm():
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    norm.forward = lambda x: F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)
    return norm


REFUSED = {
    "holds a script": (OWN, scripted, "a part of it is in TorchScript"),
    "exchanged forward": ("norm", patched_norm, "its forward was replaced"),
    "another forward of its class": ("norm", norm, "norm returns is kept from here on"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_run_again_is_kept_and_named(kind, caplog, monkeypatch):
    unit, part, because = REFUSED[kind]
    if "class" in kind:
        noise = iter(range(99))

        def drawn(self, x):
            made = F.layer_norm(x, (WIDTH,), self.weight, self.bias)
            return made + F.dropout(x) + next(noise) % 2

        monkeypatch.setattr(nn.LayerNorm, "forward", drawn)
    plain, model = around_part(part), around_part(part)
    manager = make_manager(recompute=(unit, "nothing.*"))
    with caplog.at_level(logging.WARNING), offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            noise = iter(range(99))
            expected = train(plain)
            noise = iter(range(99))
            assert_same(expected, group_step(model, manager))
    assert manager.last_step.recomputed_bytes == 0
    assert because in caplog.text
    assert "no module here matches 'nothing.*'" in caplog.text


class GradModeRMSNorm(OwnRMSNorm):
    """Has another kernel where no gradient is needed."""

    def forward(self, x):
        if torch.is_grad_enabled():
            return F.layer_norm(x, (WIDTH,), self.weight)
        return super().forward(x)


class WarmingLayerNorm(nn.LayerNorm):
    """Warms up by its calls."""

    num_calls = 0

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x) * min(1.0, self.num_calls / 10)


@pytest.mark.parametrize(
    "part", [Counts, Sparse, Forces, norm_of_a_network, GradModeRMSNorm, WarmingLayerNorm]
)
def test_a_module_runs_again_as_in_its_forward_and_leaves_no_trace(part):
    plain, model = around_part(part), around_part(part)
    offload = around(model, (OWN, "norm"))
    for _ in range(3):
        assert_same(train(plain), train(model, offload))
        assert offload.end_step()
        assert recomputed_bytes(offload.manager) > 0
    assert getattr(model.own_norm, "num_calls", 3) == 3


def test_a_module_that_changes_what_it_is_given_is_named_in_its_first_forward():
    model = around_part(Adding)
    with pytest.raises(StateError, match=r"own_norm changes in place what it is given"):
        train(model, around(model, (OWN,)))


class EmulatesBfloat16(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return made.bfloat16().float() if function is torch.ops.aten.gelu.default else made


class TanhGelu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        more = {"approximate": "tanh"} if function is F.gelu else {}
        return function(*args, **{**(kwargs or {}), **more})


def rounding_outputs():
    return register_module_forward_hook(lambda m, i, o: (o * 16).round() / 16 + o - o.detach())


@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.parametrize("mode", [EmulatesBfloat16, TanhGelu, rounding_outputs])
def test_what_a_mode_around_the_forward_changes_is_not_recomputed(mode, is_outside):
    model = around_part(lambda: nn.Sequential(nn.GELU()))

    def within(context):
        both = (mode(), context) if is_outside else (context, mode())
        stack = contextlib.ExitStack()
        for one in both:
            stack.enter_context(one)
        return stack

    expected = train(model, within(contextlib.nullcontext()))
    offload = around(model, NAMED)
    assert_same(expected, train(model, within(offload)))
    assert offload.end_step()
    assert offload.last_step.recomputed_bytes == 0


class TaskLayerNorm(nn.Module):
    """Of its own weights takes those of the task, which a number and a list tell."""

    task = 0

    def __init__(self):
        super().__init__()
        self.weight, self.tasks = nn.Parameter(torch.rand(2, WIDTH)), [0]

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight[self.task + self.tasks[0]])


def with_dropout():
    return nn.Sequential(OwnRMSNorm(), nn.Dropout())


def another_weight(part, i):
    part.weight = nn.Parameter(torch.full((2, WIDTH), 1.0 + i))


STATES = {
    "a number": (TaskLayerNorm, lambda part, i: setattr(part, "task", i)),
    "a list": (TaskLayerNorm, lambda part, i: part.tasks.__setitem__(0, i)),
    "of a known class": (nn.LeakyReLU, lambda part, i: setattr(part, "negative_slope", 0.1 + i)),
    "a rate": (with_dropout, lambda part, i: setattr(part[1], "p", i / 3)),
    "its mode": (with_dropout, lambda part, i: part.train(bool(i))),
    "weights": (OwnRMSNorm, lambda part, i: part.weight.data.fill_(1.0 + i)),
    "weights of a known class": (norm, lambda part, i: part.weight.data.fill_(1.0 + i)),
    "other weights": (TaskLayerNorm, another_weight),
}


@pytest.mark.parametrize("kind", STATES)
def test_what_a_module_had_counts_where_it_changes_between_forwards(kind):
    part, change = STATES[kind]
    units = ("norm", "mlp_act") if "known class" in kind else (OWN,)

    def gradients(context):
        model = around_part(part)
        offload = context(model)
        losses = []
        for i in (0, 1):
            torch.manual_seed(i)
            change(model.own_norm, i)
            with offload:
                losses.append(model(make_inputs() + i).square().mean())
        sum(losses).backward()
        named = model.first.weight, model.last.weight
        return [p.grad for p in named], offload

    expected, _ = gradients(lambda _: contextlib.nullcontext())
    found, offload = gradients(lambda model: around(model, units))
    assert_same(expected, found)
    assert offload.end_step()
    assert offload.last_step.recomputed_bytes > 0


class Scaled(nn.Module):
    def forward(self, x, scales):
        return x.cos() * scales[0][0]


class Applied(nn.Module):
    def forward(self, x, other):
        return other(x.cos())


class Giving(nn.Module):
    """Gives its part a list inside a tuple, which it changes later, or another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if isinstance(self.inner, Applied):
            return self.inner(x, nn.Identity())
        scales = ([2.0],)
        y = self.inner(x, scales)
        scales[0][0] = 3.0
        return y


@pytest.mark.parametrize("inner", [Scaled, Applied])
def test_what_may_change_of_arguments_counts_as_it_was(inner):
    plain, model = (around_part(lambda: Giving(inner())) for _ in range(2))
    offload = around(model, ("**inner",))
    assert_same(train(plain), train(model, offload))
    assert offload.end_step()
    assert (recomputed_bytes(offload.manager) > 0) == (inner is Scaled)


def per_sample(model):
    return torch.vmap(model)(torch.randn(5, 4, WIDTH)).square().mean()


def tangent(model):
    x = torch.randn(4, WIDTH)
    out, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return (out * slope).mean()


def fake(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(4, WIDTH)).square().mean()
    return sum(p.sum() for p in model.parameters())


@pytest.mark.parametrize("forward", [per_sample, tangent, fake])
def test_a_first_forward_of_another_kind_needs_nothing(forward):
    grads = []
    for is_on in (False, True):
        model = make_model()
        torch.manual_seed(1)
        with around(model, NAMED) if is_on else contextlib.nullcontext():
            loss = forward(model)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


def test_frozen_weights_that_are_there_for_the_forward_alone_count_as_they_were():
    def make():
        model = around_part(OwnRMSNorm)
        norm = model.own_norm.requires_grad_(False)
        weight, away = norm.weight, nn.Parameter(torch.empty(WIDTH, device="meta"), False)
        norm.register_forward_pre_hook(lambda n, _: n._parameters.update(weight=weight))
        norm.register_forward_hook(lambda n, *_: n._parameters.update(weight=away))
        return model

    model = make()
    assert_same(train(make()), train(model, around(model, (OWN,))))


def test_a_scripted_model_or_part_is_taken_as_it_is():
    scripted_part = torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU()))
    for model in (scripted_part, nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted_part)):
        for _ in range(3):  # it optimises itself
            expected = train(model)
        assert_same(expected, train(model, around(model, NAMED)))
    manager = make_manager(recompute=NAMED)
    with offload_modules(model, ["0"], manager=manager):
        assert_same(expected, group_step(model, manager))


class ConstantsRMSNorm(OwnRMSNorm):
    """Reads what it makes itself, views of its parameters, and what it has made of them."""

    def forward(self, hidden_states):
        scale = torch.tensor([1.0, 2.0]).repeat(WIDTH // 2)
        weight = (self.weight.data.view(-1) + self.weight.detach()) * torch.arange(WIDTH)
        made = super().forward(hidden_states) * (weight + scale).to(hidden_states.dtype)
        return F.dropout(made, 0.3)


@pytest.mark.parametrize("min_tensor_bytes", [0, 1024])
def test_what_a_norm_makes_and_draws_itself_is_recomputed(min_tensor_bytes):
    model = around_part(ConstantsRMSNorm)
    expected = train(model)
    config = make_config(min_tensor_bytes=min_tensor_bytes, recompute=OWN)
    stash = {"max_fwd_stash_size": 1, "warn_if_no_head": False}  # groups end inside the norm
    offload = get_act_offloading_ctx_manager(model, config=config, **stash)
    for _ in range(3):
        assert_same(expected, train(model, offload))
    offload.end_step()
    assert recomputed_bytes(offload.manager) >= ROWS * WIDTH * 4


def test_small_weights_give_the_same_product():
    """They are copied; by what needs a gradient a product of matrices chooses its kernel."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(129), nn.Linear(129, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.down(self.up(self.norm(x).transpose(0, 1)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(129, 129), Transposed())
    x = torch.randn(5, 7, 129)
    expected = train(model, inputs=x)
    manager = make_manager(recompute=("norm", "*.up"))
    with offload_modules(model, ["*"], manager=manager):
        assert_same(expected, group_step(model, manager, x))
    assert manager.last_step.recomputed_bytes_by_unit.keys() == {"*.up"}


def test_a_forward_that_raises_leaves_nothing_to_the_next():
    class RaisingOnce(OwnRMSNorm):
        has_raised = False

        def forward(self, x):
            torch.rand(3)
            if not self.has_raised:
                self.has_raised = True
                raise ZeroDivisionError
            return F.dropout(super().forward(x), 0.3)

    model = around_part(RaisingOnce)
    manager = make_manager(recompute=OWN)
    with offload_modules(model, ["*"], manager=manager):
        with pytest.raises(ZeroDivisionError):
            group_step(model, manager)
        found = group_step(model, manager)
    assert_same(train(model), found)
    assert recomputed_bytes(manager) > 0


def test_what_another_hook_makes_of_an_output_is_saved_as_ever(caplog):
    def make():
        model = make_model()
        model[0].norm.register_forward_hook(lambda *_: _[-1] * 2)
        model[1].norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        return model

    plain, model = make(), make()
    manager = make_manager(recompute=("norm",))
    with offload_modules(model, ["*"], manager=manager):
        for one in (plain, model):
            one[2].norm.register_forward_hook(lambda *_: _[-1] * 3, prepend=True)
        for _ in range(2):
            assert_same(train(plain), group_step(model, manager))
    assert recomputed_bytes(manager) == ROWS * WIDTH * 4
    assert "2.norm, and maybe others, is kept: another hook of it comes in between" in caplog.text


def test_units_of_modules():
    assert unit_of(nn.LayerNorm(4)) == unit_of(nn.RMSNorm(4)) == "norm"
    assert unit_of(nn.GELU()) == unit_of(nn.SiLU()) == "mlp_act"
    for module in (OwnRMSNorm(), WarmingLayerNorm(), nn.ReLU(), nn.BatchNorm1d(4), make_model()):
        assert unit_of(module) is None


@pytest.mark.parametrize("door", ["OffloadActivations", "CPUOffload", "operation_groups"])
def test_what_a_door_cannot_recompute_it_refuses(door):
    for unit in (*RECOMPUTE_KINDS, "*.norm"):
        config = make_config(recompute=(unit,))
        said = rf"{door} can't recompute '{re.escape(unit)}'; get_act_offloading_ctx_manager and"
        with pytest.raises(ConfigError, match=said):
            refuse_unserved(door, config)
