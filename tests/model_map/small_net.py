"""A small model with layers, a context with rows around it, and its steps beside those without."""

from __future__ import annotations

import torch
from programs import assert_same, take_steps
from torch import nn

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.engine.hooks import owner_of_hooks

WIDTH = 32


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hooks_seen = []

    def forward(self, x):
        self.hooks_seen.append(type(owner_of_hooks()))
        y = self.norm(x)
        x = x + self.q(y).sin() * self.k(y)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net(num_layers=4):
    torch.manual_seed(0)
    return Net(num_layers)


def around(net, rows, **settings):
    config = OffloadConfig(rows=rows, min_tensor_bytes=0, **settings)
    return get_act_offloading_ctx_manager(net, config=config, min_offload_size=0)


AT_ONCE = {"max_inflight_bytes": 0, "prefetch_bytes": 0}


def check(make, rows, *given, **settings):
    """Compare the steps of a net with rows to those without; return the context after them."""
    expected, net = take_steps(make(), None, *given), make()
    context = around(net, rows, **settings)
    assert_same(expected, take_steps(net, context, *given))
    assert context.end_step()
    return context


def changed_net(change):
    """Return a net, of which each layer was changed by a function."""
    net = make_net()
    for layer in net.layers:
        change(layer)
    return net
