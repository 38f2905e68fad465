"""A frozen product with peft's adapters behind it is recomputed only where it is needed."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict

import pytest
import torch
from losses import assert_same_bits
from torch import nn
from torch.profiler import profile

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager


class Mlp(nn.Module):
    """What has an adapted layer last, and does something with what that returns."""

    def __init__(self, end):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.end = end

    def forward(self, x):
        return self.end(self.last, self.first(x).tanh())


class Layer(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.mlp = Mlp(end)

    def forward(self, x):
        return x + self.mlp(x)


class Layers(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layers = nn.ModuleList(Layer(end) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def caught(layer, x):
    try:
        return layer(x).sin()
    except BaseException:  # noqa: BLE001 - whatever comes
        return x[..., :8] * 2


def in_checkpoint(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def without_grad(layer, x):
    with torch.no_grad():
        scale = layer(x)
    return x[..., :8] * scale


def on_host(layer, x):
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


ENDS = {
    "last": (1, lambda layer, x: layer(x)),
    "added to": (1, lambda layer, x: layer(x) + 1),
    "saved": (2, lambda layer, x: layer(x).sin()),
    "twice": (4, lambda layer, x: layer(x) + layer(x * 2)),
    "where": (2, lambda layer, x: torch.where(layer(x) > 0, x[..., :8], x[..., 8:]).exp()),
    "caught": (2, caught),
    "checkpoint": (2, in_checkpoint),
    "no grad": (2, without_grad),
    "on host": (1, on_host),
}
"""By name how often a frozen product of all rows is computed for a layer in a step, and by what."""


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    from torch._dynamo import utils

    monkeypatch.setattr(utils, "counters", defaultdict(Counter))


def run_adapted(end, change=None, **settings):
    """Return losses and gradients of five steps, and how many frozen products the last computes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=["last"], **adapters)
    model = peft.inject_adapter_in_model(config, Layers(end))
    found, context = [], contextlib.nullcontext()
    for layer in model.layers:
        layer.mlp.first.requires_grad_()
    if settings:
        config = OffloadConfig(policy="modules", **settings)
        context = get_act_offloading_ctx_manager(model, config=config, min_offload_size=1)
    for number in range(5):
        with profile(record_shapes=True) if number == 4 else contextlib.nullcontext() as profiled:
            with context:
                loss = model(torch.randn(2, 3, 8)).square().mean()
            loss.backward()
        found += [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if change is not None and number == 2:
            change(model)
    shapes = [event.input_shapes[:2] for event in profiled.events() if event.name == "aten::linear"]
    return found, shapes.count([[2, 3, 16], [8, 16]])


@pytest.mark.parametrize("end", ENDS)
def test_a_frozen_product_of_which_nothing_is_saved_is_not_recomputed(end):
    num_products, function = ENDS[end]
    expected, _ = run_adapted(function)
    found, num_found = run_adapted(function, recompute=["mlp"])
    assert_same_bits(expected, found)
    assert num_found == 3 * num_products


def _each(change):
    def change_all(model):
        for layer in model.layers:
            change(layer.mlp.last)

    return change_all


CHANGES = {
    "merged": _each(lambda layer: layer.merge()),
    "disabled": _each(lambda layer: layer.enable_adapters(False)),
    "trained": _each(lambda layer: layer.base_layer.requires_grad_()),
    "of a class of its own": _each(
        lambda layer: setattr(layer, "base_layer", nn.Sequential(layer.base_layer))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_has_no_adapter_in_force_is_recomputed_in_full(change):
    end = ENDS["last"][1]
    expected, _ = run_adapted(end, CHANGES[change])
    found, _ = run_adapted(end, CHANGES[change], recompute=["mlp"])
    assert_same_bits(expected, found)


def test_a_product_that_depends_on_all_rows_is_of_all(monkeypatch):
    product = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: product(self, x / x.abs().max()))
    expected, _ = run_adapted(ENDS["last"][1])
    found, num_products = run_adapted(ENDS["last"][1], recompute=["mlp"])
    assert_same_bits(expected, found)
    assert num_products == 6


def test_a_forward_that_saves_more_behind_its_adapters_is_not_left_midway():
    depths = []

    def nested(layer, x):
        depths.append(len(depths))
        y = layer(x) * (1 + len(depths))
        depths.pop()
        return y.sin()

    expected, _ = run_adapted(nested)
    found, _ = run_adapted(nested, recompute=["mlp"])
    assert_same_bits(expected, found)
    assert not depths
