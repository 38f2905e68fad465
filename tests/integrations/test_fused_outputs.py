"""What TransformerEngine's fused layers save of their own is recomputed, unless quantised."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from programs import (
    TWO_TIMINGS,
    assert_nothing_left,
    assert_same,
    in_group,
    make_config,
    make_manager,
)

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.whole_model import get_act_offloading_ctx_manager
from megatron_offload.recompute import transformer_engine

UNITS = ("norm", "mlp_act")
ROWS, WIDTH = 16, 32
BYTES = 4 * ROWS * WIDTH


def normalize(
    inputmat, ln_out, ln_weight, ln_bias, eps, output_quantizer, output_dtype, normalization, *_
):
    made = F.layer_norm(inputmat, (WIDTH,), ln_weight, ln_bias, eps).to(output_dtype)
    mean = inputmat.mean(dim=-1)
    return (made if output_quantizer is None else output_quantizer(made)), mean, mean


def gelu(x, quantizer, limit=6.0):
    made = F.gelu(x).clamp(max=limit)
    return made if quantizer is None else quantizer(made)


class _LayerNormMLP(torch.autograd.Function):
    """Saves what TransformerEngine's does."""

    @staticmethod
    def forward(ctx, x, norm, one, two, module, quantizer):
        inputmat = x.view(-1, WIDTH)
        normed, _, _ = module.apply_normalization(
            inputmat, None, norm, None, 1e-5, quantizer, x.dtype, "LayerNorm", 0, False
        )
        hidden = normed @ one
        activate = module._act_func("gelu", None)[0]
        acted = activate(hidden, quantizer, limit=5.0)
        ctx.save_for_backward(inputmat, norm, normed, one, hidden, acted, two)
        return (acted @ two).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        inputmat, norm, normed, one, hidden, acted, two = ctx.saved_tensors
        grad = grad.view(-1, WIDTH)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            (d_hidden,) = torch.autograd.grad(gelu(leaf, None, limit=5.0), leaf, grad @ two.t())
            x, w = inputmat.detach().requires_grad_(), norm.detach().requires_grad_()
            d_x, d_norm = torch.autograd.grad(
                F.layer_norm(x, (WIDTH,), w, None, 1e-5), (x, w), d_hidden @ one.t()
            )
        return d_x.view(ROWS, 1, WIDTH), d_norm, normed.t() @ d_hidden, acted.t() @ grad, None, None


@pytest.fixture
def module(monkeypatch):
    """The module of TransformerEngine's that has this function, with the names that it calls."""
    transformer_engine.uninstall()
    found = None
    for name in transformer_engine._MODULES[-2:]:
        found = types.ModuleType(name)
        found.apply_normalization = normalize
        monkeypatch.setitem(sys.modules, name, found)
    found.LayerNormMLP = object
    found._act_func = lambda activation, recipe: (gelu, "backward", None)
    yield found
    transformer_engine.uninstall()
    assert found.apply_normalization is normalize
    assert found._act_func("gelu", None) == (gelu, "backward", None)


class Fused(torch.nn.Module):
    """A model that is one fused layer; it saves ``wide`` times as much in between."""

    def __init__(self, module, wide=1, quantizer=None):
        super().__init__()
        self.module, self.quantizer = module, quantizer
        self.norm = torch.nn.Parameter(torch.rand(WIDTH))
        self.one = torch.nn.Parameter(torch.randn(WIDTH, wide * WIDTH))
        self.two = torch.nn.Parameter(torch.randn(wide * WIDTH, WIDTH))

    def forward(self, x):
        weights = self.norm, self.one, self.two
        return _LayerNormMLP.apply(x, *weights, self.module, self.quantizer)


def gradients(module, around=None, *, manager=None, quantizer=None):
    torch.manual_seed(0)
    model, x = Fused(module, quantizer=quantizer), torch.randn(ROWS, 1, WIDTH, requires_grad=True)
    if manager is not None:
        for parameter in model.parameters():
            manager.mark_not_offload(parameter)
    with around or torch.enable_grad():
        y = in_group(manager, model, x * 2).square().mean()
    y.backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_the_norm_and_the_activation_are_recomputed(timing, module):
    expected = gradients(module)
    manager = make_manager(timing, recompute=UNITS, checking=True)
    for _ in range(3):
        with manager.step():
            assert_same(expected, gradients(module, manager=manager))
        assert manager.last_step.recomputed_bytes_by_unit == {"norm": BYTES, "mlp_act": BYTES}
        assert manager.last_step.by_name["g"].recomputed_bytes == 2 * BYTES
        assert manager.last_step.offloaded_bytes == 2 * BYTES
        assert_nothing_left(manager)


def test_at_a_door_that_marks_nothing_too(module):
    expected = gradients(module)
    config = make_config(recompute=UNITS)
    around = {"config": config, "min_offload_size": 0, "warn_if_no_head": False}
    offload = get_act_offloading_ctx_manager(torch.nn.Module(), **around)
    for _ in range(2):
        assert_same(expected, gradients(module, offload))
        assert offload.end_step()
        assert offload.last_step.by_name["activations"].recomputed_bytes == 2 * BYTES


def row_of(unit):
    return {"site": unit, "recompute": True}


def adopted(model, rows):
    manager = make_manager(rows=list(rows))
    adopt_model(model, manager, is_part=True)
    return manager


def take_step(model, manager, x=None):
    x = torch.randn(ROWS, 1, WIDTH) if x is None else x
    with manager.step():
        manager.begin_chunk()
        model(x * 2).square().mean().backward()


@pytest.mark.parametrize("unit", UNITS)
def test_a_row_of_functions_alone_drops_what_they_make(unit, module, caplog):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Fused(module)), torch.randn(ROWS, 1, WIDTH)
    model(x * 2).square().mean().backward()
    expected = [one.grad for one in model.parameters()]
    manager = adopted(model, [row_of(unit)])
    for _ in range(3):  # the first is watched, the second shows that the bits are the same
        model.zero_grad()
        take_step(model, manager, x)
        assert_same(expected, [one.grad for one in model.parameters()])
    step = manager.last_step
    assert (step.recomputed_bytes, step.offloaded_bytes) == (BYTES, 0)
    assert {record.module for record in caplog.records} == {"verdicts"}
    assert_nothing_left(manager)


def test_each_row_of_functions_is_counted_by_its_name(module):
    model = torch.nn.Sequential(Fused(module), Fused(module))
    manager = adopted(model, map(row_of, UNITS))
    for _ in range(3):
        take_step(model, manager)
    by_name = manager.last_step.by_name
    assert {unit: by_name[unit].recomputed_bytes for unit in UNITS} == dict.fromkeys(
        UNITS, 2 * BYTES
    )


class GradientCheckpointingLayer(torch.nn.Module):
    """A layer by its name."""

    def __init__(self, module, wide=1):
        super().__init__()
        self.mlp = Fused(module, wide)

    def forward(self, x):
        return self.mlp(x * 2)


def layers(module, num=2):
    return torch.nn.Sequential(*(GradientCheckpointingLayer(module) for _ in range(num)))


@pytest.mark.parametrize("most", [1, 2, "all"])
def test_what_a_site_recomputes_is_not_kept_where_some_of_its_tensors_are_offloaded(module, most):
    model = layers(module)
    manager = adopted(model, [*map(row_of, UNITS), {"site": "mlp", "offload": most}])
    for _ in range(3):
        take_step(model, manager)
        assert manager.last_step.recomputed_bytes == 4 * BYTES
        assert manager.last_step.offloaded_bytes == 2 * BYTES * (1 if most == 1 else 2)


@pytest.mark.parametrize("most", [1, "all"])
def test_rows_of_functions_that_come_later_have_their_effect(module, most):
    row, model = {"site": "mlp", "offload": most}, layers(module)
    manager, found = make_manager(rows=[row]), []
    for rows in ([row], [row, *map(row_of, UNITS)]):
        manager.follow_rows(OffloadConfig(rows=rows).rows)
        adopt_model(model, manager, is_part=True)
        for _ in range(3):
            take_step(model, manager)
        found.append(manager.last_step.recomputed_bytes)
    assert found == [0, 4 * BYTES]


class SharingLayer(GradientCheckpointingLayer):
    """Saves what its part is given, which saves it too."""

    def forward(self, x):
        x = x * 2
        return self.mlp(x) + x.sin()


def test_what_is_recomputed_is_none_of_the_largest_tensors_that_a_row_offloads(module):
    model = torch.nn.Sequential(*(SharingLayer(module, wide=4) for _ in range(2)))
    manager = adopted(model, [row_of("mlp_act"), {"site": "mlp", "offload": 2}])
    with pytest.raises(ConfigError, match="which would not be freed"):
        take_step(model, manager, torch.randn(ROWS, 1, WIDTH, requires_grad=True))


def test_what_is_quantised_moves(module):
    def quantizer(made):
        return made * 0.5

    expected = gradients(module, quantizer=quantizer)
    manager = make_manager(recompute=UNITS)
    with manager.step():
        assert_same(expected, gradients(module, manager=manager, quantizer=quantizer))
    assert "norm" not in manager.last_step.recomputed_bytes_by_unit


def test_a_version_that_is_not_known_is_left_alone(module):
    def other(inputmat, weight):
        return inputmat

    module.apply_normalization = other
    make_manager().begin_chunk()
    assert module.apply_normalization is other
    module.apply_normalization = normalize
