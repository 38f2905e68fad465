"""A Llama whose linear layers have adapters with dropout: every kind of site keeps its bits."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from llama_programs import make_model, train
from losses import assert_same_bits
from torch import nn

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager

ADAPTED = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "layer": ["layer"],
    "mlp": ["mlp"],
    "attention": ["attention", "mlp"],
    "some layers": ["model.layers.0-1", "mlp"],
    "norm": ["**.*layernorm", "model.norm"],
    "adapter": ["**.adapter"],
    "dropout": ["**.adapter.dropout", "**.act_fn"],
    "everything": ["**.adapter", "**.*layernorm", "mlp_act", "loss"],
}


class Adapter(nn.Module):
    """As peft's LoRA: two small matrices behind dropout."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.up(self.down(self.dropout(x))) * 2.0


class Adapted(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.base, self.adapter = linear, Adapter(linear)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def make_adapted():
    model = make_model(None).requires_grad_(False)
    for module in list(model.modules()):
        for name in ADAPTED:
            if isinstance(getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapted(getattr(module, name)))
    return model


def take_steps(model, context):
    return [x for _ in range(3) for x in train(model, context)]


@functools.cache
def expected(dtype):
    return take_steps(make_adapted().to(dtype), contextlib.nullcontext())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_llama_with_adapters_keeps_its_bits(kind, dtype):
    model = make_adapted().to(dtype)
    config = OffloadConfig(recompute=KINDS[kind], policy="modules")
    context = get_act_offloading_ctx_manager(model, config=config, min_offload_size=1)
    assert_same_bits(expected(dtype), take_steps(model, context))
    context.end_step()
    assert any(group.recomputed_bytes for group in context.last_step.by_name.values())
