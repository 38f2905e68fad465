"""What TransformerEngine's layers and torch's kernels make is recomputed to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_transformer_engine import PRECISIONS, autocast, recipe_of, te

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager

pytestmark = pytest.mark.gpu

MIB = 1 << 20
UNITS = ("norm", "mlp_act")
TOKENS, WIDTH = 2048, 1024
OPTIONS = {"params_dtype": torch.bfloat16, "device": "cuda"}

LAYERS = {
    "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH, **OPTIONS),
    "RMSNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **OPTIONS),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 4 * WIDTH, **OPTIONS),
    "LayerNormMLP, gated": lambda: te.LayerNormMLP(
        WIDTH, 4 * WIDTH, activation="swiglu", bias=False, normalization="RMSNorm", **OPTIONS
    ),
    "LayerNorm, Linear": lambda: torch.nn.Sequential(
        te.LayerNorm(WIDTH, dtype=torch.bfloat16, device="cuda"), te.Linear(WIDTH, WIDTH, **OPTIONS)
    ),
    "RMSNorm, SiLU": lambda: torch.nn.Sequential(
        torch.nn.RMSNorm(WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.nn.SiLU(),
        torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda"),
    ),
    "LayerNorm, GELU": lambda: torch.nn.Sequential(
        torch.nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.nn.GELU("tanh"),
        torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda"),
    ),
}


def config(**settings):
    return OffloadConfig(
        backend="cuda",
        host_slab_bytes=64 * MIB,
        host_memory_bytes=8 * 1024 * MIB,
        min_tensor_bytes=64 * 1024,
        max_inflight_bytes=0,
        prefetch_bytes=0,
        policy={"kind": "modules"},  # nothing is looked for
        **settings,
    )


def make_model(kind):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(LAYERS[kind]() for _ in range(3)))


def train(model, recipe, manager=None, context=None):
    model.zero_grad()
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", generator=generator)
    x.requires_grad_()
    with manager.step() if manager else contextlib.nullcontext():
        with context or contextlib.nullcontext(), autocast(recipe):
            loss = model(x * 1.5).float().square().mean()
        loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_a_step_that_keeps_everything(kind, precision):
    recipe = recipe_of(precision)
    plain, model = make_model(kind), make_model(kind)
    manager = PipelineOffloadManager(config(recompute=UNITS, checking=True))
    with offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            assert_same(train(plain, recipe), train(model, recipe, manager))
            assert_nothing_left(manager)
    if precision == "bf16":
        assert "norm" in manager.last_step.recomputed_bytes_by_unit
        assert ("mlp_act" in manager.last_step.recomputed_bytes_by_unit) is (
            "MLP" in kind or "LU" in kind
        )


def test_a_fused_norm_is_offloaded():
    model = make_model("LayerNormLinear")
    made = []
    for units in ((), ("norm",)):
        manager = PipelineOffloadManager(config(recompute=units))
        with offload_modules(model, ["*"], manager=manager):
            train(model, None, manager)
            made.append(sum(g.recomputed_bytes for g in manager.last_step.by_name.values()))
        manager.close()
    assert made == [0, 3 * TOKENS * WIDTH * 2]


def test_plain_pytorch_with_a_gate():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            self.norm = torch.nn.RMSNorm(WIDTH, **options)
            self.gate, self.up = (torch.nn.Linear(WIDTH, 2 * WIDTH, **options) for _ in range(2))
            self.down = torch.nn.Linear(2 * WIDTH, WIDTH, **options)
            self.act = torch.nn.SiLU()

        def forward(self, x):
            y = self.norm(x.float()).to(x.dtype)
            return x + self.down(self.act(self.gate(y)) * self.up(y))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Gated() for _ in range(3)))
    expected = train(model, None)
    offload = get_act_offloading_ctx_manager(
        model, config=config(recompute=UNITS, checking=True), warn_if_no_head=False
    )
    for _ in range(3):
        assert_same(expected, train(model, None, context=offload))
        assert offload.end_step()
    assert "mlp_act" in offload.last_step.recomputed_bytes_by_unit
