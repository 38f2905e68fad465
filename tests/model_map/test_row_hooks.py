"""Where rows have hooks, and what a forward that is watched leaves of its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from programs import assert_same, in_thread, make_manager, take_steps
from small_net import WIDTH, around, changed_net, make_net
from torch import nn

from megatron_offload import (
    OffloadActivations,
    OffloadConfig,
    get_act_offloading_ctx_manager,
    offload_modules,
)
from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.hooks import owner_of_hooks
from megatron_offload.errors import StateError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.model_map import watch


def test_layers_without_rows_have_no_hooks_of_saved_tensors():
    net = make_net()
    context = around(net, [{"site": "mlp", "layers": "0-1", "offload": 1}])
    take_steps(net, context)
    for layer in net.layers:
        seen = layer.hooks_seen
        assert seen == [watch.SavedMemory, type(None), type(None)]  # the first is watched


def test_nothing_is_looked_at_again(monkeypatch):
    made = []
    real = watch.SavedMemory.__init__
    monkeypatch.setattr(
        watch.SavedMemory, "__init__", lambda self, *given: made.append(1) or real(self, *given)
    )
    net = make_net()
    rows = [{"site": "mlp", "offload": 1}, {"site": "norm", "recompute": True}]
    context = around(net, rows)
    take_steps(net, context, (8, 8))
    net.eval()
    with torch.no_grad(), context:
        net(torch.randint(50, (1, 3)))
    with context:
        net(torch.randint(50, (1, 3)))  # nobody goes back
    net.train()
    take_steps(net, context, (20, 6, 9), num_forwards=3)
    take_steps(net, around(net, rows), (8, 8))  # another context of the same model
    assert made == [1]
    take_steps(net, around(net, rows[:1]), (8, 8))
    assert made == [1, 1]
    net.layers[0].q = nn.Linear(WIDTH, WIDTH)
    take_steps(net, around(net, rows[:1]), (8, 8))
    assert made == [1, 1, 1]


def test_a_model_with_rows_is_freed_by_reference_counts():
    net = make_net()
    rows = [{"site": "mlp", "offload": 1}, {"site": "norm", "layers": "0-2", "recompute": True}]
    context = around(net, [*rows, {"site": "layer", "layers": 3, "recompute": True}])
    take_steps(net, context)
    parts = [weakref.ref(part) for part in net.layers[2:].modules()]
    gc.disable()
    try:
        del net
        assert not any(part() for part in parts[1:])
    finally:
        gc.enable()


# What was found by breaking it.


def test_parts_of_compiled_graphs_are_left_alone_by_the_watch():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_mlp(layer):
        layer.mlp = torch.compile(layer.mlp, backend=backend, fullgraph=True)

    expected = take_steps(changed_net(compile_mlp))
    torch.compiler.reset()
    num_graphs = len(graphs)
    graphs.clear()
    net = changed_net(compile_mlp)
    assert_same(expected, take_steps(net, around(net, [{"site": "norm", "recompute": True}])))
    assert len(graphs) == num_graphs


def test_another_thread_neither_ends_the_watch_nor_is_in_the_context():
    net, seen = make_net(), []
    context = around(net, [{"site": "mlp", "offload": 1}, {"site": "norm", "recompute": True}])

    def train_beside(*_):
        if threading.current_thread() is threading.main_thread() and not seen:
            in_thread(lambda: seen.append(net(torch.randint(50, (1, 4)))))

    net.head.register_forward_pre_hook(train_beside)
    take_steps(net, context)
    assert len(seen) == 1, "it has raised"
    assert owner_of_hooks() is None
    context.end_step()
    assert context.last_step.by_name["norm"].recomputed_bytes > 0


def test_a_forward_whose_model_is_not_called_itself_is_watched_too():
    net = make_net()
    context = around(net, [{"site": "norm", "recompute": True}])
    for _ in range(3):
        with context:
            x = net.embed(torch.randint(50, (2, 8)))
            for layer in net.layers:
                x = layer(x)
        x.sum().backward()
    context.end_step()
    assert context.last_step.by_name["norm"].recomputed_bytes > 0


def test_a_model_that_has_changed_and_a_copy_are_watched_anew():
    net, both = make_net(), ("norm", "mlp")
    take_steps(net, around(net, [{"site": site, "recompute": True} for site in both]))
    for layer in net.layers:
        layer.q = nn.Sequential(nn.Identity(), layer.q)
    copies = copy.deepcopy(net), copy.deepcopy(net)
    for model, sites in ((net, both), (copies[0], both), (copies[1], ("layer",))):
        expected = take_steps(copy.deepcopy(model))
        context = around(model, [{"site": site, "recompute": True} for site in sites])
        assert_same(expected, take_steps(model, context))
        context.end_step()
        by_name = context.last_step.by_name
        assert all(by_name[site].recomputed_bytes > 0 for site in sites)


def test_a_watch_by_hand_ends_with_its_thread_s_forward_or_an_abort():
    net, manager = make_net(), make_manager(rows=[{"site": "norm", "recompute": True}])

    def evaluate_beside(*_):
        with torch.no_grad():
            net(torch.randint(50, (1, 4)))

    def interrupt(*_):
        raise KeyboardInterrupt

    with offload_modules(net, [], manager=manager):
        handle = net.head.register_forward_pre_hook(interrupt)
        with handle, pytest.raises(KeyboardInterrupt), manager.step():
            net(torch.randint(50, (2, 8)))
        assert owner_of_hooks() is None, "abort takes it off"
        watches = []

        def look(*_):
            if threading.current_thread() is threading.main_thread():
                in_thread(evaluate_beside)
                watches.extend((type(owner_of_hooks()), len(manager.observers)))

        net.head.register_forward_pre_hook(look)
        with manager.step():
            net(torch.randint(50, (2, 8))).sum().backward()
        assert watches == [watch.SavedMemory, 1]
        assert owner_of_hooks() is None
        assert manager.observers == []


def test_hooks_of_rows_before_do_nothing_under_others():
    net, manager = make_net(), make_manager(min_tensor_bytes=0, max_inflight_bytes=0)
    rows = [RowConfig(site=site, recompute=True) for site in ("mlp", "norm")]
    manager.follow_rows(rows, is_own=True)
    adopt_model(net, manager)
    recomputed = []
    for followed in (rows, rows, (), [RowConfig(site="attention", offload=1)], None, rows):
        manager.follow_rows(followed, is_own=True)
        with manager.step():
            net(torch.randint(50, (2, 8))).sum().backward()
        recomputed.append(manager.last_step.recomputed_bytes > 0)
    assert recomputed == [True, True, False, False, False, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": [{"site": "mlp", "offload": 1}, {"site": "norm", "recompute": True}]},
        {"recompute": ["layer"], "policy": "modules"},
        {"policy": "auto", "simulated": {"host_time": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_context_that_is_closed_leaves_no_hooks(settings, num_steps):
    config = OffloadConfig(backend="simulated", min_tensor_bytes=0, **settings)
    net = make_net()
    context, other = get_act_offloading_ctx_manager(net, config=config), make_net()
    unknown = OffloadActivations(config=config) if settings.get("policy") == "auto" else None
    take_steps(net, context, (8,) * num_steps)
    take_steps(other, unknown, (8,) * num_steps)
    for one in filter(None, (context, unknown)):
        one.close()
        with contextlib.suppress(StateError), one:
            net(torch.randint(50, (2, 8)))
    modules = [*net.modules(), *other.modules()]
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in modules)
