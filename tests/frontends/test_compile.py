"""Compiled models: the engine runs between graphs, moves what it would, and changes no bit."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from processes import run_python
from programs import assert_nothing_left, assert_same, make_config, make_manager
from torch import nn
from zoo import Mlp

import megatron_offload
from megatron_offload import OffloadConfig
from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.frontends.whole_model import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
)
from megatron_offload.integrations import transformer_engine as policy

UNITS = ("norm", "**.norm", "**.linear_fc1")


class OwnLayerNorm(nn.LayerNorm):
    """Of a class that isn't known."""


class Layer(nn.Module):
    norm_class = nn.LayerNorm

    def __init__(self, width):
        super().__init__()
        self.norm = self.norm_class(width)
        self.mlp = Mlp(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.output = nn.Linear(width, 8)

    def run_layers(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.output(self.run_layers(self.embed(x)))


def make_model(kind=Model):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return kind()


def compile_part(model, part, backend):
    if part == "model":
        return torch.compile(model, backend=backend)
    if part == "model in place":
        model.compile(backend=backend)
    elif part == "layers":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)
    elif part == "layers in place":
        for layer in model.layers:
            layer.compile(backend=backend)
    elif part == "inside":
        for layer in model.layers:
            layer.mlp.linear_fc1 = torch.compile(layer.mlp.linear_fc1, backend=backend)
    return model


def train(model, *, context=None, step=contextlib.nullcontext, rows=(16, 16, 24)):
    generator = torch.Generator().manual_seed(1)
    seen = []
    for num_rows in rows:  # the third shape is compiled anew
        model.zero_grad()
        with step():
            with context or contextlib.nullcontext():
                loss = model(torch.randn(num_rows, 32, generator=generator)).square().mean()
            loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return seen


def eager_bytes(names):
    model, manager = make_model(), make_manager(recompute=UNITS)
    offload_modules(model, names, manager=manager)
    train(model, step=manager.step)
    return manager.last_step.offloaded_bytes


def test_a_module_that_was_marked_before_it_was_compiled_is_one_group_when_marked_again():
    model, manager = make_model(), make_manager()
    offload_modules(model, ["layers.*"], manager=manager)
    model = compile_part(model, "layers", "eager")
    offload_modules(model, ["layers.*"], manager=manager)
    train(model, step=manager.step, rows=(16,))
    assert manager.last_step.num_groups == 2


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["marked first", "compiled first"])
@pytest.mark.parametrize(
    "names", [["layers.*.mlp"], ["layers.*"], ["mlp_fc1", "mlp_act", "mlp_fc2"]]
)
@pytest.mark.parametrize("part", ["model", "model in place", "layers", "layers in place", "inside"])
def test_whatever_is_compiled_and_marked(part, names, order):
    backend = "aot_eager"
    expected = train(compile_part(make_model(), part, backend))
    model, manager = make_model(), make_manager("random", recompute=UNITS)
    if order == "marked first":
        hooks = offload_modules(model, names, manager=manager)
        model = compile_part(model, part, backend)
    else:
        model = compile_part(model, part, backend)
        hooks = offload_modules(model, names, manager=manager)
    assert all("_orig_mod" not in path for found in hooks.groups.values() for path in found)
    assert_same(expected, train(model, step=manager.step))
    # A graph saves what its backward needs of it, which is not what eager would: less, mostly.
    assert 0.4 * eager_bytes(names) < manager.last_step.offloaded_bytes
    assert_nothing_left(manager)


@pytest.mark.by_default
@pytest.mark.parametrize("what", ["model", "head", "unknown", "recompute", "offload"])
def test_full_graphs_that_are_compiled_inside_a_context_run_as_without(what):
    rows = [{"site": "layer", what: True}] if what == "recompute" else None
    rows = [{"site": "layer", "offload": "all"}] if what == "offload" else rows

    def train(has_context):
        model = called = make_model()
        if what == "model":
            model = called = torch.compile(model, backend="aot_eager", fullgraph=True)
        elif what in ("head", "unknown"):
            called = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
        else:
            for layer in model.layers:
                mlp = layer.mlp
                mlp.forward = torch.compile(mlp.forward, backend="aot_eager", fullgraph=True)
        config = make_config(rows=rows, min_tensor_bytes=0)
        context = contextlib.nullcontext()
        if has_context and what == "unknown":
            context = OffloadActivations(config=config)
        elif has_context:
            context = get_act_offloading_ctx_manager(model, config=config)
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            with context:
                loss = called(torch.randn(4, 32)).square().mean()
            loss.backward()
            found += [loss.detach(), *(x.grad.clone() for x in model.parameters())]
        return found

    assert_same(train(False), train(True))


def test_rows_that_a_run_has_found_end_no_graph():
    manager, model = make_manager(), make_model()
    manager.follow_rows([RowConfig(site="mlp", offload="all")], is_own=True)
    adopt_model(model, manager)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    found = train(model, step=manager.step)
    assert_same(train(make_model()), found)


@pytest.mark.by_default
def test_a_function_around_a_model_is_compiled_once_in_a_search():
    from llama_programs import make_model as make_llama
    from torch._dynamo.testing import CompileCounterWithBackend

    found = {"policy": {"kind": "auto", "most_slowdown_percent": 300}, "min_tensor_bytes": 0}
    config = OffloadConfig(backend="simulated", simulated={"host_time": True}, **found)
    model, counter = make_llama(None), CompileCounterWithBackend("eager")
    ids = torch.ones(2, 8, dtype=torch.long)
    context = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    called = torch.compile(lambda: model(ids, labels=ids, use_cache=False).loss, backend=counter)
    for _ in range(24):
        with context:
            loss = called()
        loss.backward()
    assert context.manager.tuner.is_converged
    assert counter.frame_count == 1


@pytest.mark.by_default
def test_a_compiled_model_is_one_in_which_rows_are_looked_for():
    config = OffloadConfig(backend="simulated", simulated={"host_time": True})
    model = torch.compile(make_model(), backend="aot_eager")
    context = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    with context:
        model(torch.randn(4, 32)).sum().backward()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_s_graphs_move_and_are_bitwise_identical():
    results = []
    for min_tensor_bytes in (1 << 30, 0):  # the same graphs, once with nothing that is offloaded
        model, manager = make_model(), make_manager(min_tensor_bytes=min_tensor_bytes)
        offload_modules(model, ["layers.*.mlp"], manager=manager)
        results.append(train(compile_part(model, "model", "inductor"), step=manager.step))
    assert_same(*results)
    assert manager.last_step.offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("norm_class", [nn.LayerNorm, OwnLayerNorm])
def test_the_layers_around_marks_are_still_graphs(norm_class, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setattr(Layer, "norm_class", norm_class)
    model, manager = make_model(), make_manager(recompute=UNITS)
    offload_modules(model, ["layers.*"], manager=manager)
    counter = CompileCounterWithBackend("eager")
    train(torch.compile(model, backend=counter), step=manager.step, rows=(16, 16))
    assert counter.frame_count == 3, "what is before the layers, one for both layers, the rest"
    assert counter.op_count == 7
    assert manager.last_step.offloaded_bytes > 0


class WithContext(Model):
    """Enters something around its layers, in the code that is compiled."""

    context = None

    def run_layers(self, x):
        if self.context is None:
            return super().run_layers(x)
        with self.context:
            return super().run_layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("kind", ["whole", "ratio", "none"])
def test_contexts_around_and_inside_compiled_code(kind, where):
    expected = train(torch.compile(make_model(WithContext), backend="aot_eager"))
    model = make_model(WithContext)
    contexts = {
        "whole": lambda: OffloadActivations(min_offload_size=0, manager=make_manager()),
        "ratio": lambda: CPUOffload(1.0, tag="compiled", config=make_config()),
        "none": NoOpManager,
    }
    context = contexts[kind]()
    if where == "inside":
        model.context = context
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(expected, train(compiled, context=context if where == "around" else None))
    if kind != "none":
        context.end_step()
        assert context.last_step.offloaded_bytes > 0


class ByHand(Model):
    manager = None

    def run_layers(self, x):
        if self.manager is None:
            return super().run_layers(x)
        for layer in self.layers:
            x = start_group(self.manager, x, "layer")
            with self.manager:
                x = layer(x)
            x = commit_group(self.manager, x, "layer")
        return x


def test_marks_by_hand_inside_compiled_code():
    expected = train(torch.compile(make_model(ByHand), backend="aot_eager"))
    model = make_model(ByHand)
    model.manager = manager = make_manager()

    @contextlib.contextmanager
    def step():
        with manager.step():
            manager.begin_chunk()
            yield

    assert_same(expected, train(torch.compile(model, backend="aot_eager"), step=step))
    assert manager.last_step.num_groups == 2
    assert manager.last_step.offloaded_bytes > 0


@pytest.mark.slow
def test_a_training_step_is_compiled_whole():
    def run(manager):
        model = make_model()
        if manager:
            offload_modules(model, ["layers.*"], manager=manager)

        @torch.compile(backend="aot_eager")
        def step(x):
            with manager.step() if manager else contextlib.nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            return loss.detach()

        generator = torch.Generator().manual_seed(1)
        losses = [step(torch.randn(16, 32, generator=generator)) for _ in range(3)]
        return losses + [p.grad for p in model.parameters()]

    manager = make_manager()
    assert_same(run(None), run(manager))
    assert manager.last_step.offloaded_bytes > 0


class Inline(Model):
    """Has the loop over its layers in its forward: graphs end within, at hooks."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x).square()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["marked first", "compiled first", "first forward is watched"])
def test_a_context_is_given_a_model_that_is_compiled_before_or_later(order):
    kind, rows = Model, None
    if order == "first forward is watched":
        kind, rows = Inline, [{"layers": 1, "site": "mlp", "offload": "all"}]
    expected = train(torch.compile(make_model(kind), backend="aot_eager"))
    model, manager = make_model(kind), make_manager(rows=rows)
    if order == "compiled first":
        model = torch.compile(model, backend="aot_eager")
    offload = get_act_offloading_ctx_manager(model, min_offload_size=0, manager=manager)
    if order != "compiled first":
        model = torch.compile(model, backend="aot_eager")
    assert_same(expected, train(model, context=offload))
    offload.end_step()
    assert offload.last_step.offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("moves", [True, False])
def test_settings_of_operations_hold_in_compiled_code(moves):
    expected = train(torch.compile(make_model(), backend="aot_eager"))
    groups = policy.operation_groups(manager=make_manager())
    model = make_model()
    for layer in model.layers:
        policy.set_activation_offloading(layer.mlp, moves)
    assert_same(expected, train(torch.compile(model, backend="aot_eager")))
    groups.end_step_if_over()
    assert (groups.manager.last_step.offloaded_bytes > 0) is moves


def test_a_full_graph_is_refused_with_where_to_read_on():
    model = make_model()
    offload_modules(model, ["layers.*"], manager=make_manager())
    with pytest.raises(RuntimeError, match=r"docs/compile\.md"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 32))


@pytest.mark.slow
def test_the_compiler_is_not_imported_by_those_who_compile_nothing():
    names = ", ".join(megatron_offload.__all__)
    code = f"import sys; from megatron_offload import {names}; "
    found = run_python("-c", f"{code}print('torch._dynamo' in sys.modules)")
    assert found.stdout == "False\n"
