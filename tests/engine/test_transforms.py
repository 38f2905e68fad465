"""Forward-mode AD, function transforms and mutable saved tensors: exact, or refused in time."""

from __future__ import annotations

import contextlib

import pytest
import torch
from programs import TIMINGS, assert_nothing_left, assert_same, in_group, make_manager
from torch import nn
from torch.autograd import forward_ad

from megatron_offload import OffloadConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.frontends.whole_model import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
)


def make_model():
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()
    return nn.Sequential(*layers)


X = torch.linspace(-1, 1, 8 * 64).view(8, 64)


@contextlib.contextmanager
def one_group(manager):
    manager.begin_chunk()
    start_group(manager, X, "group")
    with manager:
        yield
    commit_group(manager, X, "group")


def under_jvp(model, context):
    with context:
        value, tangent = torch.func.jvp(model, (X,), (torch.ones_like(X),))
    (value.sum() + tangent.square().sum()).backward()
    return [value, tangent]


def with_dual_numbers(model, context):
    with forward_ad.dual_level():
        with context:
            y = model(forward_ad.make_dual(X, torch.ones_like(X)))
        value, tangent = forward_ad.unpack_dual(y)
        (value.sum() + tangent.square().sum()).backward()
        return [value.clone(), tangent.clone()]


def under_vmap(model, context):
    with context:
        value = torch.func.vmap(model)(X)
    value.square().sum().backward()
    return [value]


def entered_under_vmap(model, context):
    def loss_of(x):
        with context:
            return model(x).square()

    value = torch.func.vmap(loss_of)(X)
    value.sum().backward()
    return [value]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("door", ["whole", "marks"])
@pytest.mark.parametrize("program", [under_jvp, with_dual_numbers, under_vmap, entered_under_vmap])
def test_transforms_are_exact(program, door, timing):
    model = make_model()
    expected = program(model, contextlib.nullcontext()) + [p.grad for p in model.parameters()]
    model, manager = make_model(), make_manager(timing)
    if door == "whole":
        context = OffloadActivations(min_offload_size=0, manager=manager)
    else:
        context = one_group(manager)
    found = program(model, context) + [p.grad for p in model.parameters()]
    assert_same(expected, found)
    manager.reset()
    assert manager.last_step.offloaded_bytes > 0
    assert_nothing_left(manager)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make_model() for _ in range(2))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("settings", "is_around"),
    [
        ({"rows": [{"site": "layer", "offload": 1}]}, True),
        ({"rows": [{"site": "layer", "recompute": True}]}, True),
        ({"policy": {"kind": "modules"}}, False),
        (None, False),
    ],
)
def test_where_torch_refuses_hooks_nothing_is_recorded_and_nothing_raises(settings, is_around):
    net, manager = Net(), make_manager(**(settings or {}))
    gradients = [torch.func.grad(lambda x: net(x).square().sum())]
    gradients += [torch.func.vmap(gradients[0])]
    expected = [gradient(X) for gradient in gradients]
    context = contextlib.nullcontext()
    if settings is None:
        offload_modules(net, ["layers.*"], manager=manager)
    else:
        context = get_act_offloading_ctx_manager(net, manager=manager, min_offload_size=0)
    for _ in range(3):
        with context:
            loss = net(X).square().sum()
        loss.backward()
        with context if is_around else contextlib.nullcontext():
            assert_same(expected, [gradient(X) for gradient in gradients])
    with context:
        loss = net(X).square().sum()
    loss.backward()
    manager.reset()
    assert manager.last_step.offloaded_bytes + manager.last_step.recomputed_bytes > 0


@pytest.mark.parametrize("program", [under_jvp, under_vmap])
def test_a_search_looks_at_forwards_of_transforms(program):
    net = Net()
    expected = program(net, contextlib.nullcontext())
    found = {"policy": {"kind": "auto", "most_slowdown_percent": 300}, "min_tensor_bytes": 0}
    config = OffloadConfig(backend="simulated", simulated={"host_time": True}, **found)
    context = get_act_offloading_ctx_manager(net, config=config, warn_if_no_head=False)
    for _ in range(30):
        assert_same(expected, program(net, context))


@pytest.mark.parametrize("order", ["context around", "context inside"])
def test_torch_s_own_refusal_of_hooks_leaves_a_clean_context(order):
    manager = make_manager()
    context = OffloadActivations(min_offload_size=0, manager=manager)
    model = make_model()

    def loss_of(x):
        with context if order == "context inside" else contextlib.nullcontext():
            return model(x).sum()

    with (
        context if order == "context around" else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        torch.func.grad(loss_of)(X)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    expected, plain = model(X).sum(), list(model.parameters())
    expected = torch.autograd.grad(expected, plain)
    with context:
        loss = model(X).sum()
    assert_same(expected, torch.autograd.grad(loss, plain))
    del loss
    assert context.end_step()
    assert context.last_step.offloaded_bytes > 0
    assert_nothing_left(manager)


@pytest.mark.parametrize("door", ["whole", "group"])
def test_what_hooks_of_others_keep_is_left_to_them_and_counted(door, caplog):
    manager = make_manager()
    context = OffloadActivations(min_offload_size=0, manager=manager)
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), manager.step():
        x = torch.ones(64, requires_grad=True)
        y = x.clone()
        if door == "whole":
            with context:
                z = y.square()
        else:
            z = in_group(manager, torch.square, y)
        assert not any(chunk.open_groups for chunk in manager.decisions.entered)
        y.sin_()
        z.sum().backward()
        stats = manager.last_step
    assert torch.equal(x.grad, torch.full((64,), 2.0))
    assert (stats.num_groups, stats.num_hidden_groups) == (0, 1)
    assert "of torch.autograd.graph" in caplog.text
    assert_nothing_left(manager)
