"""What TransformerEngine's modules quantise of their weights stays, from the first step on."""

from __future__ import annotations

import contextlib
import operator
import sys
import types

import pytest
import torch
from programs import TWO_TIMINGS, assert_nothing_left, assert_same, make_manager

from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.recompute import transformer_engine

ROWS, WIDTH = 16, 32
BYTES = 4 * ROWS * WIDTH


class Storage:
    """Saved as its parts, like what TransformerEngine makes for one forward alone."""

    def __init__(self, data):
        self.data = data
        self.scale = torch.full((WIDTH, WIDTH), 0.5)

    def __tensor_flatten__(self):
        return ["data", "scale"], None

    def prepare_for_saving(self):
        parts, self.data, self.scale = (self.data, self.scale), None, None
        return parts


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        quantised, _ = module.quantize_weight(tensor=weight)
        y = x * 1.5 @ quantised.data * 0.5
        ctx.save_for_backward(x * 1.5, *quantised.prepare_for_saving())
        return y

    @staticmethod
    def backward(ctx, grad):
        x, data, scale = ctx.saved_tensors
        return grad @ (data * scale).T, x.T @ grad * 0.5, None


def patched(modules):
    """Return what is under the names that are patched."""
    grouped = modules.grouped_linear._GroupedLinear
    return [
        modules.linear.quantize_weight,
        vars(grouped)["_prepare_weights_for_grouped_tensor_gemm"],
        modules.base.TransformerEngineBaseModule.get_weight_workspace,
    ]


@pytest.fixture
def modules(monkeypatch):
    """Modules with the names and habits of TransformerEngine's."""
    transformer_engine.uninstall()
    found = {}
    for name in transformer_engine._MODULES:
        module = types.ModuleType(name)
        module.quantize_weight = lambda *, tensor: (Storage(tensor.detach() * 1.0), None)
        monkeypatch.setitem(sys.modules, name, module)
        found[name.rsplit(".", 1)[1]] = module

    class GroupedLinear:
        @staticmethod
        def _prepare_weights_for_grouped_tensor_gemm(weights):
            return [Storage(weight.detach() * 1.0) for weight in weights], [None]

    class TransformerEngineBaseModule:
        def get_weight_workspace(self, *, tensor):
            return Storage(tensor.detach() * 1.0)

    found["grouped_linear"].GroupedLinear = found["grouped_linear"]._GroupedLinear = GroupedLinear
    found["layernorm_mlp"].LayerNormMLP = object
    found["base"].TransformerEngineBaseModule = TransformerEngineBaseModule
    namespace = types.SimpleNamespace(**found)
    before = patched(namespace)
    yield namespace
    for _ in range(2):
        transformer_engine.uninstall()
    assert all(map(operator.is_, patched(namespace), before))


def gradients(module, around=None):
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    with around or contextlib.nullcontext():
        y = _Linear.apply(x, weight, module)
    y.sum().backward()
    return x.grad, weight.grad


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_only_the_activation_moves(modules, timing, kind):
    module = getattr(modules, kind)
    expected = gradients(module)
    manager = make_manager(timing)
    offload = OffloadActivations(min_offload_size=0, manager=manager)
    for _ in range(2):
        assert_same(expected, gradients(module, offload))
        assert offload.end_step()
        assert offload.last_step.offloaded_bytes == BYTES
        assert_nothing_left(manager)


def test_grouped_weights_and_those_of_earlier_versions_are_marked_too(modules):
    for _ in range(2):
        transformer_engine.install()
    grouped = modules.grouped_linear._GroupedLinear
    results, _ = grouped._prepare_weights_for_grouped_tensor_gemm([torch.ones(2), torch.ones(2)])
    earlier = modules.base.TransformerEngineBaseModule().get_weight_workspace(tensor=torch.ones(2))
    for storage in (*results, earlier):
        assert storage.data._do_not_offload
        assert storage.scale._do_not_offload


def test_a_library_that_is_being_imported_is_left_alone(modules, monkeypatch):
    found = modules.linear.quantize_weight
    monkeypatch.delitem(sys.modules, transformer_engine._MODULES[-1])
    transformer_engine.install()
    assert modules.linear.quantize_weight is found
