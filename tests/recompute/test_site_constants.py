"""What a rerun has saved that needs no gradient: who has it, and for how long."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from attentive_net import WIDTH, around, make_net
from programs import take_steps
from torch import nn

from megatron_offload.memory.storage_ref import StorageRef


class Given(torch.autograd.Function):
    """Has a saved constant as the gradient of its first argument."""

    @staticmethod
    def forward(ctx, own, constant):
        ctx.save_for_backward(constant)
        return own.new_ones(())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def test_a_constant_that_a_backward_returns_is_taken_by_no_gradient():
    constant = torch.ones(WIDTH)
    net = make_net(lambda layer: Given.apply(layer.own, constant))
    for layer in net.layers:
        layer.own = nn.Parameter(torch.zeros(WIDTH))
    context = around(net, "layer")
    for _ in range(3):
        with context:
            loss = net(torch.randint(50, (2, 8))).sum()
        loss.backward()
    assert torch.equal(constant, torch.ones(WIDTH))
    assert all(torch.equal(layer.own.grad, torch.full((WIDTH,), 3.0)) for layer in net.layers)


@pytest.mark.parametrize("retains", [False, True])
def test_a_constant_in_memory_of_numpy_is_taken_for_a_gradient_where_it_would_be_without(retains):
    def train(kinds):
        values = np.ones((3, WIDTH), np.float32)
        numbers = iter(range(1_000))
        net = make_net(
            lambda layer: Given.apply(layer.own, torch.from_numpy(values[next(numbers) % 3]))
        )
        for layer in net.layers:
            layer.own = nn.Parameter(torch.zeros(WIDTH))
        context = around(net, kinds) if kinds else contextlib.nullcontext()
        with context:
            loss = net(torch.arange(16).view(2, 8)).sum()
        loss.backward(retain_graph=retains)
        if retains:
            loss.backward()
        return values.tolist(), [layer.own.grad.tolist() for layer in net.layers]

    assert train("layer") == train(None)


class Fresh(torch.autograd.Function):
    """Saves a constant that it has made."""

    made = None

    @staticmethod
    def forward(ctx, own):
        constant = own.detach() * 2
        Fresh.made = StorageRef(constant.untyped_storage())
        ctx.save_for_backward(constant)
        return own.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def test_a_constant_that_nothing_else_has_goes_with_its_backward_though_a_graph_is_left():
    def factor(layer):
        layer.note = layer.own * layer.own  # a graph that no backward comes by
        return Fresh.apply(layer.own)

    net = make_net(factor)
    for layer in net.layers:
        layer.own, layer.note = nn.Parameter(torch.ones(WIDTH)), None
    take_steps(net, around(net, "layer"))
    assert Fresh.made.expired()


def test_a_part_that_a_call_freezes_for_a_while_is_left_as_it_was():
    class Freezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x).tanh()
            self.last.requires_grad_(False)
            x = self.last(x).sin()
            self.last.requires_grad_(True)
            return x

    layers = nn.ModuleDict({"layers": nn.ModuleList(Freezing() for _ in range(2))})
    context = around(layers, ["layer"])
    for _ in range(3):
        x = torch.randn(4, 8)
        with context:
            for layer in layers.layers:
                x = layer(x)
        x.sum().backward()
        assert all(layer.last.weight.requires_grad for layer in layers.layers)
