"""Layers recomputed on a real device: every bit, and no more memory than a checkpoint."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.heads = nn.RMSNorm(width), 8
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, width=1024, num_layers=6):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x):
        first = x = x * 1.0
        for layer in self.layers:
            x = layer(x) + first
        return x


def train(kinds=None, *, checkpoints=False, autocast=False, num_steps=4, **settings):
    """Return losses, gradients and random states, and the peak of the last step in bytes."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = Net().to(torch.float32 if autocast else torch.bfloat16)
    context = contextlib.nullcontext()
    if kinds:
        named = {} if "rows" in settings else {"recompute": kinds}
        config = OffloadConfig(**named, **settings)
        context = get_act_offloading_ctx_manager(net, config=config, warn_if_no_head=False)
    for layer in net.layers if checkpoints else ():
        layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)
    found = []
    for number in range(num_steps):
        shape = 2, 512 + 128 * (number % 2), 1024
        x = torch.randn(shape, device="cuda", dtype=net.layers[0].out.weight.dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with context, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = net(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in net.parameters())]
        net.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    if kinds:
        assert context.end_step() or not context.manager.may_record
        assert context.last_step.by_name[kinds[0]].recomputed_bytes > 20 * MIB
    return [*found, torch.cuda.get_rng_state()], peak


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kinds", [("layer",), ("mlp",), ("mlp", "norm")], ids="+".join)
@pytest.mark.parametrize("settings", [{}, {"policy": "modules"}, {"checking": True}], ids=str)
def test_sites_recomputed_on_a_device_keep_every_bit(kinds, settings, autocast):
    expected, _ = train(autocast=autocast)
    found, _ = train(kinds, autocast=autocast, **settings)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_layers_recomputed_on_a_device_take_no_more_memory_than_checkpoints():
    torch.use_deterministic_algorithms(False)  # else attention's backward takes most
    (_, plain), (_, checkpointed), (_, ours) = (
        train(),
        train(checkpoints=True),
        train(("layer",), rows=[{"site": "layer", "recompute": True}]),  # no search besides
    )
    assert checkpointed < plain - 50 * MIB
    assert ours < 1.02 * checkpointed
