"""Rows: what they name is offloaded or recomputed with every bit, and the rest costs nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import types
import weakref
from collections import OrderedDict
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from llama_programs import make_model as make_llama
from llama_programs import train as train_llama
from processes import torchrun
from programs import StepsOf, assert_nothing_left, assert_same, in_thread, make_manager, take_steps
from small_net import WIDTH, Block, Mlp, around, make_net
from torch import nn

from megatron_offload import (
    CPUOffload,
    OffloadActivations,
    OffloadConfig,
    get_act_offloading_ctx_manager,
    offload_modules,
)
from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.hooks import owner_of_hooks
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map import watch
from megatron_offload.model_map.module_hooks import ModuleHook
from megatron_offload.model_map.offload_site import NoHooks
from megatron_offload.model_map.structure import layers_of

AT_ONCE = {"max_inflight_bytes": 0, "prefetch_bytes": 0}


def check(make, rows, *given, **settings):
    """Compare the steps of a net with rows to those without; return the context after them."""
    expected, net = take_steps(make(), None, *given), make()
    context = around(net, rows, **settings)
    assert_same(expected, take_steps(net, context, *given))
    assert context.end_step()
    return context


@pytest.mark.parametrize("layers", ["0-7", "all"])
def test_losses_without_a_backward_take_no_more_of_the_limits_than_are_alive(layers):
    def offloaded_bytes(num_skipped):
        net = make_net(16)
        context = around(net, [{"site": "mlp", "layers": layers, "offload": "all"}])
        for number in range(8 + num_skipped):
            with context:
                loss = net(torch.arange(40)[None]).sum()
            if not 4 <= number < 4 + num_skipped:
                loss.backward()
        context.end_step()
        return context.last_step.offloaded_bytes

    of_two_alive = offloaded_bytes(1)
    assert offloaded_bytes(20) == of_two_alive > 0


def test_rows_whose_sites_a_forward_does_not_come_by_are_not_silent(caplog):
    net, tokens = make_net(), torch.arange(40)[None]
    context = around(net, [{"site": "mlp", "offload": "all"}])
    with torch.no_grad(), context:
        make_net()(tokens)
    with context:
        net(tokens).sum().backward()
    for other in (torch.nn.Identity(), make_net()) * 3:
        with context:
            other(tokens)
    assert "none of their sites" not in caplog.text
    context = around(net, [{"site": "mlp", "offload": "all"}])
    for _ in range(5):
        with context:
            make_net()(tokens).sum().backward()
    assert caplog.text.count("none of their sites was called") == 1


def changed_net(change):
    """Return a net, of which each layer was changed by a function."""
    net = make_net()
    for layer in net.layers:
        change(layer)
    return net


ROWS = {
    "offload all of the MLPs": [{"site": "mlp", "offload": "all"}],
    "offload the largest two": [{"site": "mlp", "offload": 2}],
    "offload activations": [{"site": "mlp.act", "offload": "all"}],
    "recompute MLPs": [{"site": "mlp", "recompute": True}],
    "recompute layers": [{"site": "layer", "recompute": True}],
    "recompute norms": [{"site": "norm", "recompute": True}],
    "some of each": [
        {"site": "layer", "layers": 0, "recompute": True},
        {"site": "mlp", "layers": "1-2", "offload": 1},
        {"site": "norm", "layers": "1,3", "recompute": True},
    ],
    "inside another": [
        {"site": "layer", "layers": "0-1", "offload": "all"},
        {"site": "mlp", "layers": "0-1", "recompute": True},
    ],
}


@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_keep_every_bit_and_do_what_they_say(rows, num_forwards):
    context = check(make_net, rows, (8, 8, 12, 5, 8), num_forwards, **AT_ONCE)
    by_name = context.last_step.by_name
    assert {*by_name} == {row["site"] for row in rows}
    for row in rows:
        does = by_name[row["site"]]
        assert (does.recomputed_bytes if "recompute" in row else does.offloaded_bytes) > 0
    assert_nothing_left(context.manager)


def offloaded(net, most):
    """Return what a row offloads of MLPs in each of three steps."""
    context, found = around(net, [{"site": "mlp", "offload": most}], **AT_ONCE), []
    for _ in range(3):
        take_steps(net, context, (8,))
        context.end_step()
        found.append(context.last_step.by_name["mlp"].offloaded_bytes)
    return found


def test_a_row_offloads_no_more_than_its_largest_tensors():
    width_bytes = 4 * 2 * 8 * WIDTH * 4  # of four layers, and of floats
    first, second, third = offloaded(make_net(), 2)
    assert first == second == third == 2 * 4 * width_bytes
    assert offloaded(make_net(), 1)[-1] == 4 * width_bytes
    assert offloaded(make_net(), "all")[-1] > third


def test_what_is_recomputed_in_front_of_a_site_is_dropped_where_two_of_its_tensors_are_offloaded():
    def change(layer):
        layer.forward = lambda x: x + layer.mlp(layer.norm(x))

    rows = [{"site": "mlp", "offload": 2}, {"site": "norm", "recompute": True}]
    does = check(partial(changed_net, change), rows, (8, 8), **AT_ONCE).last_step.by_name["mlp"]
    assert does.recomputed_bytes == 4 * 2 * 8 * WIDTH * 4


def test_limits_follow_what_rows_would_offload_of_all_layers_and_memory_comes_back():
    net = make_net(16)
    context = around(net, [{"site": "mlp", "layers": "0-9", "offload": 2}])
    take_steps(net, context, (8, 8, 8))
    budget, layer_bytes = context.manager.budget, 2 * 2 * 8 * 4 * WIDTH * 4
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == (2 * layer_bytes, 2 * layer_bytes)
    assert context.end_step()
    does = context.last_step.by_name["mlp"]
    assert does.reloaded_bytes == does.offloaded_bytes == 10 * layer_bytes
    assert context.last_step.num_late_reloads == 0


def test_steps_too_short_for_rows_change_nothing_in_those_that_come():
    net = make_net(16)
    row = {"site": "mlp", "layers": "0-6", "offload": 2, "min_tokens": 10}
    context = around(net, [row])
    for length in (8, 2, 2, 8, 8):
        take_steps(net, context, (length,))
    assert context.end_step()
    assert context.last_step.reloaded_bytes == 7 * 2 * 2 * 8 * 4 * WIDTH * 4


class NumberedBlock(Block):
    """Of a chunk of a pipeline stage, as Megatron counts its layers."""

    __module__ = "megatron.core"


def test_layers_of_another_chunk_that_has_no_rows_let_the_clock_go_too():
    manager = make_manager(
        rows=[{"site": "mlp", "layers": "0-7", "offload": 2}],
        max_inflight_bytes=None,
        prefetch_bytes=None,
    )
    chunks = [nn.Sequential(*(NumberedBlock() for _ in range(8))) for _ in range(2)]
    for number, layer in enumerate([*chunks[0], *chunks[1]], 1):
        layer.layer_number = number
    for chunk in chunks:
        adopt_model(nn.ModuleDict({"layers": chunk}), manager, is_part=True)
    for _ in range(4):
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        with manager.step():
            for stage, chunk in enumerate(chunks):
                manager.begin_chunk(vp_stage=stage)
                x = chunk(x)
            x.sum().backward()
    assert manager.last_step.reloaded_bytes == 8 * 2 * 2 * 8 * 4 * WIDTH * 4


@pytest.mark.parametrize(
    ("row", "freed"),
    [
        ({"site": "mlp", "offload": "all"}, ["mlp.up", "mlp.act", "mlp.drop"]),
        ({"site": "mlp", "offload": 1}, ["mlp.up"]),  # the first of those that are as large
        ({"site": "mlp.act", "offload": "all"}, ["mlp.up"]),
        ({"site": "mlp", "recompute": True}, ["mlp.up", "mlp.act", "mlp.drop"]),
        ({"site": "norm", "recompute": True}, ["norm"]),
    ],
    ids=str,
)
def test_memory_that_rows_name_is_free_behind_the_forward(row, freed):
    net, seen = make_net(), {}
    context = around(net, [row], **AT_ONCE)
    take_steps(net, context)
    layer = net.layers[1]
    for name in ("norm", "mlp.up", "mlp.act", "mlp.drop"):

        def note(_, args, output, name=name):
            seen[name] = StorageRef(output.untyped_storage())

        layer.get_submodule(name).register_forward_hook(ModuleHook(note))
    with context:
        loss = net(torch.randint(50, (2, 8))).sum()
    context.manager.join_offloads()
    expired = {name for name, storage in seen.items() if storage.expired()}
    assert expired == {*freed, "mlp.act"}  # of which dropout saves no more than its own mask
    loss.backward()


def test_a_row_that_would_hold_an_input_in_place_of_an_output_says_so(caplog):
    net = make_net()
    context = around(net, [{"site": "mlp.drop", "recompute": True}])
    take_steps(net, context)
    assert "'mlp.drop' returns is kept: it doesn't save what it takes" in caplog.text
    context.end_step()
    assert context.last_step.by_name["mlp.drop"].recomputed_bytes == 0


def test_layers_without_rows_have_no_hooks_of_saved_tensors():
    net = make_net()
    context = around(net, [{"site": "mlp", "layers": "0-1", "offload": 1}])
    take_steps(net, context)
    for layer in net.layers:
        seen = layer.hooks_seen
        assert seen == [watch.SavedMemory, type(None), type(None)]  # the first is watched


def test_the_clock_goes_by_layers_without_rows():
    """What the first layers offload is freed before the others end, and reloaded before its use."""
    net = make_net(num_layers=12)
    context = around(net, [{"site": "mlp", "layers": "0-3", "offload": "all"}])
    in_flight = []
    net.head.register_forward_hook(lambda *_: in_flight.append(context.manager.window.num_inflight))
    take_steps(net, context, (8,) * 5)
    context.end_step()
    assert in_flight[-1] == 0
    stats = context.last_step.by_name["mlp"]
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    assert stats.kept_bytes == stats.num_late_reloads == 0


LONG = {
    "offload": {"site": "mlp", "offload": "all", "min_tokens": 20},
    "the largest": {"site": "mlp", "offload": 2, "min_tokens": 20},
    "recompute": {"site": "layer", "recompute": True, "min_tokens": 20},
    "an output": {"site": "mlp.act", "recompute": True, "min_tokens": 20},
}


@pytest.mark.parametrize("row", LONG.values(), ids=LONG)
@pytest.mark.parametrize("lengths", [(8, 10, 9, 12, 8), (12, 12, 9, 10, 3)], ids=str)
def test_rows_of_long_forwards_leave_others_alone(row, lengths):
    bare, net = make_net(), make_net()
    for layer in (*bare.layers, *net.layers):
        layer.mlp.drop = nn.Identity()  # else nobody saves what the activation returns
    context = around(net, [row], **AT_ONCE)
    for number, length in enumerate(lengths):
        assert_same(take_steps(bare, None, (length,)), take_steps(net, context, (length,)))
        has_groups = context.end_step()
        assert has_groups == (2 * length >= 20) or not number, "nothing of ours was in others"
        assert_nothing_left(context.manager)
    does = context.last_step.by_name[row["site"]]
    assert does.offloaded_bytes + does.recomputed_bytes > 0


def test_a_short_forward_that_raises_ends_no_group_of_a_long_one():
    net = make_net()
    context = around(net, [LONG["offload"]], **AT_ONCE)
    with context:
        long = net(torch.randint(50, (2, 12))).square().mean()
        with pytest.raises(IndexError):
            net(torch.full((2, 3), 99))
        fail = net.layers[1].mlp.down.register_forward_pre_hook(lambda *_: 1 / 0)
        with fail, pytest.raises(ZeroDivisionError):
            net(torch.randint(50, (2, 3)))
        last = net(torch.randint(50, (2, 12))).square().mean()
    (long + last).backward()
    context.end_step()
    assert context.last_step.by_name["mlp"].num_groups == 2 * 4
    assert_nothing_left(context.manager)


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


def test_what_others_save_too_is_refused():
    net = make_net()
    rows = [{"site": "q", "offload": "all"}]
    with pytest.raises(ConfigError, match=r"layers\.0\.k also save 2\.0 KiB of what layers\.0\.q"):
        take_steps(net, around(net, rows))
    take_steps(net, around(net, [*rows, {"site": "k", "offload": "all"}]))


class Shared(nn.Module):
    """Saves a parameter, its input, which others save, and what it makes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale.cos() + x.sin() * x


def test_what_others_save_of_a_site_is_kept_where_the_rest_is_freed():
    net = changed_net(lambda layer: setattr(layer, "q", Shared()))
    context = check(lambda: net, [{"site": "q", "offload": "all"}], **AT_ONCE)
    assert context.last_step.by_name["q"].offloaded_bytes == 4 * 2 * 8 * WIDTH * 4
    with pytest.raises(ConfigError, match=r"layers\.0\.k also save"):
        take_steps(net, around(net, [{"site": "q", "offload": 2}]))
    rows = [{"site": "q", "offload": "all"}, {"site": "k", "offload": "all"}]
    context = check(lambda: net, rows, **AT_ONCE)
    by_name = context.last_step.by_name  # nothing is left out any more
    assert by_name["q"].offloaded_bytes + by_name["k"].offloaded_bytes == 2 * 4 * 2 * 8 * WIDTH * 4


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"site": "mlp.atc", "recompute": True}, "no layer has a site 'mlp.atc'; did you mean"),
        ({"site": "mlp", "layers": "2-9", "offload": 1}, "there are layers 0 to 3"),
        ({"site": "mlp", "layers": "3-1", "offload": 1}, "first of some layers comes before"),
        ({"site": "mlp", "offload": 0}, "'rows.0.offload': offload is 'all', or how many"),
        ({"site": "mlp", "offload": "al"}, "offload is 'all', or how many"),
        ({"site": "loss", "layers": 1, "by_rows": True}, "that takes nothing else"),
        ({"site": "mlp", "layers": "4-x", "offload": 1}, "layers are 'all', a number"),
        ({"site": "mlp"}, "needs one action"),
        ({"site": "mlp", "offload": 1, "recompute": True}, "needs one action"),
        ({"site": "loss", "offload": 1}, "by_rows: true is for site: loss"),
        ({"site": "mlp", "ofload": 1}, "did you mean 'offload'"),
        ({"site": "attention", "offload": 1}, "no layer has a site 'attention'"),
        ({"site": "norm", "recompute": True, "min_tokens": 9}, "min_tokens is for modules of"),
        ({"site": "mlp", "offload": 1, "min_tokens": -1}, "greater than or equal to 0"),
    ],
    ids=lambda value: "",
)
def test_rows_that_cannot_be_are_refused_at_once(row, said):
    with pytest.raises(ConfigError, match=said):
        around(make_net(), [row])


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ("[{site: norm, recompute: true}, {site: mlp, ofload: 1}]", "'rows.1.ofload'"),
        (["{site: mlp, ofload: 1}"], "'rows.0.ofload'"),
        ({"site": "mlp", "ofload": 1}, "'rows.ofload'"),
    ],
)
def test_a_wrong_key_is_named_however_rows_are_given(rows, where):
    with pytest.raises(ConfigError, match=f"unknown key {where}; did you mean 'offload'"):
        OffloadConfig(rows=rows)


def test_rows_are_refused_beside_what_says_the_same_and_where_no_model_is_given():
    row = {"site": "mlp", "offload": 1}
    for other in ({"policy": "auto"}, {"recompute": "mlp"}, {"fraction": 0.5}, {"modules": "a.*"}):
        with pytest.raises(ConfigError, match="rows say what is offloaded and recomputed"):
            OffloadConfig(rows=[row], **other)
    config = OffloadConfig(rows=[row])
    for door in (OffloadActivations, CPUOffload):
        with pytest.raises(ConfigError, match="isn't given the model"):
            door(config=config)
    net = make_net()
    with pytest.raises(ConfigError, match=r"both about layers\.0\.mlp"):
        around(net, [row, {**row, "layers": 0, "offload": 2}])
    net.layers[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="is compiled, and hooks"):
        around(net, [row])
    with pytest.raises(ConfigError, match="no repeated layers"):
        around(nn.Linear(2, 2), [row])
    without = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    with pytest.raises(ConfigError, match="no layer has a site 'norm'"):
        around(without, [{"site": "norm", "recompute": True}])


def test_rows_of_compiled_layers_keep_every_bit():
    def compile_mlp(layer):
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")

    rows = [{"site": "mlp", "offload": "all"}]
    context = check(partial(changed_net, compile_mlp), rows, **AT_ONCE)
    assert context.last_step.by_name["mlp"].offloaded_bytes > 0


def test_rows_serve_a_manager_by_hand_and_copies_of_its_model():
    rows = [{"site": "mlp", "offload": "all"}, {"site": "norm", "recompute": True}]
    expected = take_steps(make_net())
    net, manager = make_net(), make_manager(rows=rows, min_tensor_bytes=0, max_inflight_bytes=0)

    with offload_modules(net, [], manager=manager):
        assert_same(expected, take_steps(net, StepsOf(manager)))
        manager.reset()
        assert manager.last_step.by_name["mlp"].offloaded_bytes > 0
        assert manager.last_step.by_name["norm"].recomputed_bytes > 0
        take_steps(copy.deepcopy(net))
        assert not manager.last_step.is_captured
    take_steps(net)
    assert all(not layer.mlp._forward_hooks for layer in net.layers)


def test_rows_that_a_run_has_found_offload_whatever_else_is_listed():
    net = make_net()
    manager = make_manager(modules=["router"], min_tensor_bytes=0, max_inflight_bytes=0)
    manager.follow_rows([RowConfig(site="mlp", offload="all")], is_own=True)
    adopt_model(net, manager)
    for _ in range(2):
        with manager.step():
            net(torch.randint(50, (2, 8))).sum().backward()
    assert manager.last_step.by_name["mlp"].offloaded_bytes > 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("row", [ROWS["offload all of the MLPs"], ROWS["recompute norms"]])
def test_a_forward_that_raises_leaves_rows_as_they_were(row, error):
    def stop(*_):
        raise error

    expected = take_steps(make_net(), None, (8, 8))
    net = make_net()
    context = around(net, row, **AT_ONCE)
    for layer in (net.layers[1].mlp.down, net.head):
        with layer.register_forward_pre_hook(stop), pytest.raises(error), context:
            net(torch.randint(50, (2, 8)))
        assert owner_of_hooks() is None
        assert context.manager.observers == []
    assert_same(expected, take_steps(net, context, (8, 8)))
    context.end_step()
    does = context.last_step.by_name[row[0]["site"]]
    assert does.offloaded_bytes + does.recomputed_bytes > 0


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


def test_rows_of_a_llama_keep_every_bit():
    rows = [
        {"site": "mlp", "layers": 0, "offload": 2},
        {"site": "mlp", "layers": 1, "recompute": True},
        {"site": "layer", "layers": 2, "recompute": True},
        {"site": "input_layernorm", "layers": "0-1,3", "recompute": True},
        {"site": "loss", "by_rows": True},
    ]
    plain, model = make_llama(None), make_llama(None)
    context = around(model, rows)
    for _ in range(3):
        expected = train_llama(plain, contextlib.nullcontext())
        assert_same(expected, train_llama(model, context))


def test_rows_on_two_ranks_keep_every_bit():
    worker = Path(__file__).parent / "rows_worker.py"
    done = torchrun(2, worker, "ddp", "fsdp2", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert sorted(done.stdout.split()) == ["ddp"] * 2 + ["fsdp2"] * 2, done.stderr[-4000:]


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


class Gated(Mlp):
    """Saves what its activation returns itself, and what one of its modules does."""

    def forward(self, x):
        y = self.act(self.up(x))
        return self.down(y * y.sin())


def test_outputs_are_dropped_where_modules_and_those_around_them_save_them():
    def change(layer):
        layer.mlp = Gated()
        layer.forward = types.MethodType(
            lambda self, x: x + self.mlp(self.norm(x)) * self.norm(x).cos(), layer
        )

    rows = [{"site": "mlp.act", "recompute": True}, {"site": "norm", "recompute": True}]
    context = check(partial(changed_net, change), rows)
    by_name, of_layers = context.last_step.by_name, 4 * 2 * 8 * 4
    assert by_name["mlp.act"].recomputed_bytes == of_layers * 4 * WIDTH
    assert by_name["norm"].recomputed_bytes == of_layers * 2 * WIDTH
    assert context.last_step.refused_recipe_bytes == {}


class Experts(nn.Module):
    """Saves many tensors that are smaller than what its layer saves."""

    def __init__(self, fails):
        super().__init__()
        self.own, self.fails, self.hooks_seen = nn.Linear(WIDTH, 4), fails, []

    def forward(self, x):
        self.hooks_seen.append(type(owner_of_hooks()))
        if self.fails and len(self.hooks_seen) > 1:
            raise ZeroDivisionError
        return self.own(x.mean(0)).sin().cos().exp().tanh().sum()


class Mixture(Mlp):
    def __init__(self, fails):
        super().__init__()
        self.experts, self.hooks_seen = Experts(fails), []

    def forward(self, x):
        y = super().forward(x) * x * x.sin()
        with contextlib.suppress(ZeroDivisionError):
            y = y + self.experts(x)
        self.hooks_seen.append(type(owner_of_hooks()))
        return super().forward(y)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "row", [{"site": "mlp", "offload": 3}, {"site": "norm", "recompute": True}], ids=str
)
def test_parts_of_which_rows_take_nothing_have_no_hooks_of_saved_tensors(row, fails):
    def change(layer):
        layer.mlp = Mixture(fails)
        layer.forward = types.MethodType(lambda self, x: x + self.mlp(self.norm(x)), layer)

    lengths, make = (8, 8, 8), partial(changed_net, change)
    expected, net = take_steps(make(), None, lengths), make()
    context = around(net, [row], **AT_ONCE)
    assert_same(expected, take_steps(net, context, lengths))
    for layer in net.layers:
        assert {*layer.mlp.experts.hooks_seen[1:]} == {type(None)}
        assert type(None) not in layer.mlp.hooks_seen[1:]
    context.end_step()
    does = context.last_step.by_name[row["site"]]
    assert does.offloaded_bytes + does.recomputed_bytes > 0
    adopt_model(net, make_manager())
    assert not any(layer.mlp.experts._forward_hooks for layer in net.layers)


def compress(module):
    """Let a user's hooks keep what a module saves in half as many bytes."""
    stack, halved = contextlib.ExitStack(), (torch.Tensor.half, torch.Tensor.float)
    hooks = torch.autograd.graph.saved_tensors_hooks
    module.register_forward_pre_hook(lambda *_: stack.enter_context(hooks(*halved)))
    module.register_forward_hook(lambda *_: stack.close())


def mixed_net():
    """Return a net whose MLPs have a part of which rows take nothing."""
    return changed_net(lambda layer: setattr(layer, "mlp", Mixture(fails=False)))


THREE = [{"site": "mlp", "offload": 3}]


def test_a_user_s_hooks_in_such_a_part_lie_above_those_of_groups():
    def train(make_context):
        net = mixed_net()
        context = make_context(net)
        take_steps(net, context, (8,))
        for layer in net.layers:
            compress(layer.mlp.experts)
        return take_steps(net, context, (8, 8))

    with_rows = train(lambda net: around(net, THREE, **AT_ONCE))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same(train(lambda net: None), with_rows)


def test_an_interrupt_in_such_a_part_leaves_no_hooks_to_a_later_call():
    def stop(*_):
        raise KeyboardInterrupt

    net = mixed_net()
    context, experts = around(net, THREE, **AT_ONCE), net.layers[0].mlp.experts
    take_steps(net, context, (8,))
    with experts.own.register_forward_hook(stop), pytest.raises(KeyboardInterrupt), context:
        net(torch.randint(50, (2, 8)))
    with context:
        for hook in experts._forward_hooks.values():
            hook(experts, (), None)  # as where another's hook raises before the part is called
        assert owner_of_hooks() is None
    take_steps(net, context, (8,))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_such_a_part_can_be_compiled_whole():
    net = mixed_net()
    take_steps(net, around(net, THREE, **AT_ONCE), (8,))
    part = net.layers[0].mlp.experts.own
    assert not part._forward_hooks
    NoHooks(lambda: None).hook(part)
    x = torch.ones(1, WIDTH)
    compiled = torch.compile(lambda x: part(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), part(x))


def test_rows_do_what_they_say_in_the_second_step_too():
    first, second, third = offloaded(mixed_net(), 3)
    assert first == second == third > 0


def test_parts_that_save_little_have_hooks_where_a_row_is_for_all_as_they_may_save_more():
    net = mixed_net()
    rows = [{"site": "mlp", "offload": "all"}]
    config = OffloadConfig(rows=rows, min_tensor_bytes=12 * WIDTH * 4, **AT_ONCE)
    take_steps(net, get_act_offloading_ctx_manager(net, config=config), (8, 8))
    assert all(type(None) not in layer.mlp.experts.hooks_seen for layer in net.layers)


def test_a_thread_that_calls_such_a_part_meanwhile_takes_no_hooks_over():
    def beside(x):
        net.layers[0].mlp.experts(x.detach())
        owners.append(owner_of_hooks())

    def call_beside(module, args):
        if threading.current_thread() is threading.main_thread():
            in_thread(lambda: beside(*args))

    def take_step():
        with manager.step():
            manager.begin_chunk()
            net(torch.randint(50, (2, 8))).sum().backward()

    owners = []
    net, manager = mixed_net(), make_manager(rows=THREE, min_tensor_bytes=0, **AT_ONCE)
    adopt_model(net, manager)
    take_step()
    net.layers[0].mlp.experts.register_forward_pre_hook(call_beside)
    take_step()
    assert owners == [None]
    assert all(layer.mlp.experts._forward_hooks for layer in net.layers)
    assert all(type(None) not in layer.mlp.hooks_seen for layer in net.layers)


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


def test_rows_for_calls_of_another_length_need_no_other_watch():
    net = make_net()
    for least, num_watched in ((0, 1), (2, 0), (10**6, 0)):
        context = around(net, [{"site": "mlp", "offload": 1, "min_tokens": least}])
        with mock.patch.object(watch.SavedMemory, "watch", autospec=True) as begun:
            take_steps(net, context)
        context.end_step()
        assert begun.call_count == num_watched
        assert (context.last_step.offloaded_bytes > 0) == (least < 10**6)


def test_a_loss_that_no_door_knows_is_said(caplog):
    rows = [{"site": "loss", "by_rows": True}]
    around(make_net(), rows)
    assert "the loss isn't by rows" in caplog.text
    with pytest.raises(ConfigError, match="offload_modules knows no loss"):
        offload_modules(make_net(), [], manager=make_manager(rows=rows))


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


def test_rows_that_are_printed_can_be_read():
    rows = (
        RowConfig(site="mlp", layers="0-2,7", offload=2),
        RowConfig(site="attention", layers=3, offload="all"),
        RowConfig(site="layer", layers="4-5", recompute=True),
        RowConfig(site="mlp.act", recompute=True, min_tokens=4096),
        RowConfig(site="loss", by_rows=True),
    )
    assert OffloadConfig(rows=f"[{', '.join(map(str, rows))}]").rows == rows


def test_an_empty_list_of_rows_keeps_all():
    net = make_net()
    context = around(net, [])
    take_steps(net, context)
    assert {*(name for layer in net.layers for name in layer.hooks_seen)} == {type(None)}
    assert context.last_step.num_groups == 0


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        blocks = OrderedDict(one=Block(), other=Block())
        blocks["other"].layer_number = 7  # a number of its own
        self.decoder = nn.Sequential(blocks)


def test_layers_are_numbered_in_each_list():
    layers = layers_of(dict(Coder().named_modules()))
    assert layers == {"encoder.0": 0, "encoder.1": 1, "decoder.one": 0, "decoder.other": 1}


def test_a_model_that_is_a_layer_itself_has_those_inside_it_alone():
    alone = type("TransformerLayer", (Block,), {})()
    assert layers_of(dict(alone.named_modules())) == {}
    alone.inner = nn.ModuleList(Block() for _ in range(2))
    assert layers_of(dict(alone.named_modules())) == {"inner.0": 0, "inner.1": 1}
    alone = type("TransformerLayer", (Block,), {})()
    with get_act_offloading_ctx_manager(alone, config=OffloadConfig(backend="simulated")):
        alone(torch.randn(4, WIDTH)).sum().backward()


def test_reloads_are_in_time_whatever_the_length_of_the_step_before():
    net = make_net(12)
    offload = around(net, [{"site": "mlp", "offload": "all", "layers": "0-8"}])
    late = []
    for length in (64, 64, 16, 64, 16, 128, 8):
        with offload:
            loss = net(torch.randint(50, (length,))).sum()
        loss.backward()
        del loss
        offload.end_step()
        late.append(offload.last_step.num_late_reloads)
        assert offload.last_step.offloaded_bytes > 0
    assert late == [1, 0, 0, 0, 0, 0, 0], "the first step has none before it"
