"""A share of the bytes under two tags, on a real device: it is exact, and so is every bit."""

from __future__ import annotations

import pytest
import torch
from programs import assert_same
from test_cuda import MIB
from torch import nn

from megatron_offload import CPUOffload
from megatron_offload.config import OffloadConfig

pytestmark = pytest.mark.gpu

TAGS = ("first", "second")
WIDTH, ROWS, LAYERS = 2048, 4096, 4


@pytest.fixture(autouse=True)
def _no_tags():
    yield
    for tag in TAGS:
        CPUOffload.forget(tag)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, **options),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, **options),
        )
        for _ in range(2 * LAYERS)
    ]
    return nn.ModuleList(layers)


def train(model, ratios):
    """Take a step in which layers of the two tags alternate; return loss and gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device="cuda", generator=generator).bfloat16()
    for place, layer in enumerate(model):
        if ratios is None:
            x = x + layer(x)
        else:
            with CPUOffload(ratios[place % 2], TAGS[place % 2]):
                x = x + layer(x)
    loss = x.float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("ratios", [(0, 1), (0.1, 0.5), (0.5, 0.1), (1, 0.5)])
def test_shares_are_exact_and_so_are_bits(model, ratios):
    expected = train(model, None)
    config = OffloadConfig(backend="cuda", host_memory_bytes=8192 * MIB, host_slab_bytes=64 * MIB)
    for ratio, tag in zip(ratios, TAGS, strict=True):
        CPUOffload(ratio, tag, config)
    for _ in range(4):
        assert_same(expected, train(model, ratios))
        for ratio, tag in zip(ratios, TAGS, strict=True):
            offload = CPUOffload(ratio, tag)
            assert offload.end_step()
            wanted = ratio * CPUOffload._tags[tag].total_bytes
            largest = 4 * WIDTH * ROWS * 2
            assert abs(offload.last_step.offloaded_bytes - wanted) <= largest
    assert CPUOffload._tags["first"].total_bytes > LAYERS * largest
