"""Graphs of inductor on a GPU, with what they save moved and with nothing was offloaded."""

from __future__ import annotations

import shutil

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_cuda import MIB, make_manager
from torch import nn

from megatron_offload.frontends.modules import offload_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="triton needs a C compiler"),
]

LAYERS, WIDTH, ROWS, STEPS = 4, 512, 4096, 4


def make_model():
    torch.manual_seed(0)
    wide, layers = 4 * WIDTH, nn.Sequential()
    for _ in range(LAYERS):
        mlp = nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)
        layers.append(nn.Sequential(nn.LayerNorm(WIDTH), *mlp))
    return layers.to("cuda", torch.bfloat16)


def train(model, manager):
    """Return losses and gradients of steps."""
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, device="cuda", generator=generator).bfloat16()
        with manager.step():
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
        results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return results


@pytest.mark.parametrize("order", ["compiled first", "marked first", "the model"])
def test_every_bit_is_that_of_the_same_graphs_where_nothing_moves(order):
    results = []
    for min_tensor_bytes in (1 << 40, 0):
        torch.compiler.reset()
        model, manager = make_model(), make_manager(min_tensor_bytes=min_tensor_bytes)
        if order == "compiled first":
            for index, layer in enumerate(model):
                model[index] = torch.compile(layer)
        offload_modules(model, ["*"], manager=manager)
        if order == "marked first":
            for layer in model:
                layer.compile()
        results.append(train(torch.compile(model) if order == "the model" else model, manager))
        assert_nothing_left(manager)
        assert (manager.last_step.offloaded_bytes > LAYERS * 4 * MIB) is (min_tensor_bytes == 0)
        manager.close()
    assert_same(*results)
