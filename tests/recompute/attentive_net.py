"""A model of attention, MLPs and dropout, whose layers hold on to what they compute."""

from __future__ import annotations

import torch
from programs import assert_same, take_steps
from torch import nn

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.memory.storage_ref import StorageRef

WIDTH = 32


KINDS = (("layer",), ("mlp",), ("attention",), ("mlp", "attention"), ("layer", "mlp", "norm"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.scale = 0.5
        self.factor = None
        self.inside = None

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        inside = x * self.scale
        self.inside = StorageRef(inside.untyped_storage())
        y = self.mlp(inside.sin()) * 0.1
        if self.factor is not None:
            y = y * self.factor(self)
        # x is read twice in here and once outside: gradients are summed in the graph's order.
        return x * y + x


class Net(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) + first
        return self.head(x)


def make_net(factor=None, kind=Net):
    torch.manual_seed(0)
    net = kind()
    for layer in net.layers:
        layer.factor = factor
    return net


def around(net, kinds, **settings):
    config = OffloadConfig(recompute=kinds, **settings)
    return get_act_offloading_ctx_manager(net, config=config, min_offload_size=1)


def check(make, kinds, lengths=(8, 11, 8), settings=None, **how):
    """Compare the steps of a net with sites to those without; return the net and its context."""
    expected, net = take_steps(make(), None, lengths, **how), make()
    context = around(net, kinds, **settings or {})
    assert_same(expected, take_steps(net, context, lengths, **how))
    return net, context
