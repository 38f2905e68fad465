"""What is recomputed at the front doors: to the bit, and really not offloaded."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict

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
from megatron_offload.errors import ConfigError
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


def group_step(model, manager, inputs=None):
    with manager.step():
        found = train(model, inputs=inputs)
    assert_nothing_left(manager)
    return found


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


def test_a_scripted_model_or_part_is_taken_as_it_is():
    scripted_part = torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU()))
    for model in (scripted_part, nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted_part)):
        for _ in range(3):  # it optimises itself
            expected = train(model)
        assert_same(expected, train(model, around(model, NAMED)))
    manager = make_manager(recompute=NAMED)
    with offload_modules(model, ["0"], manager=manager):
        assert_same(expected, group_step(model, manager))


def test_units_of_modules():
    assert unit_of(nn.LayerNorm(4)) == unit_of(nn.RMSNorm(4)) == "norm"
    assert unit_of(nn.GELU()) == unit_of(nn.SiLU()) == "mlp_act"
    own = type("Own", (nn.GELU,), {})()
    for module in (OwnRMSNorm(), own, nn.ReLU(), nn.BatchNorm1d(4), make_model()):
        assert unit_of(module) is None


@pytest.mark.parametrize("door", ["OffloadActivations", "CPUOffload", "operation_groups"])
def test_what_a_door_cannot_recompute_it_refuses(door):
    for unit in (*RECOMPUTE_KINDS, "*.norm"):
        config = make_config(recompute=(unit,))
        said = rf"{door} can't recompute '{re.escape(unit)}'; get_act_offloading_ctx_manager and"
        with pytest.raises(ConfigError, match=said):
            refuse_unserved(door, config)
