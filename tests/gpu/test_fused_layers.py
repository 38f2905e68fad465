"""What TransformerEngine's layers and torch's kernels make is recomputed to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_transformer_engine import CONFIG, PRECISIONS, autocast, recipe_of, te

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.modules import offload_modules

pytestmark = pytest.mark.gpu

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


def make_model(kind):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(LAYERS[kind]() for _ in range(3)))


def train(model, recipe, manager=None):
    model.zero_grad()
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", generator=generator)
    x.requires_grad_()
    with manager.step() if manager else contextlib.nullcontext():
        with autocast(recipe):
            loss = model(x * 1.5).float().square().mean()
        loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_a_step_that_keeps_everything(kind, precision):
    recipe = recipe_of(precision)
    plain, model = make_model(kind), make_model(kind)
    settings = {"min_tensor_bytes": 64 * 1024, "recompute": UNITS, "checking": True}
    manager = PipelineOffloadManager(CONFIG.model_copy(update=settings))
    with offload_modules(model, ["*"], manager=manager):
        for _ in range(3):
            assert_same(train(plain, recipe), train(model, recipe, manager))
            assert_nothing_left(manager)
    if precision == "bf16":
        assert "norm" in manager.last_step.recomputed_bytes_by_unit
        assert ("mlp_act" in manager.last_step.recomputed_bytes_by_unit) is (
            "MLP" in kind or "LU" in kind
        )
