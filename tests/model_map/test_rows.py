"""Rows: what they name is offloaded or recomputed with every bit, and the rest costs nothing."""

from __future__ import annotations

import contextlib
import copy
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from llama_programs import make_model as make_llama
from llama_programs import train as train_llama
from processes import torchrun
from programs import StepsOf, assert_nothing_left, assert_same, make_manager, take_steps
from small_net import AT_ONCE, WIDTH, Mlp, around, changed_net, check, make_net
from torch import nn

from megatron_offload import offload_modules
from megatron_offload.core.row_config import RowConfig
from megatron_offload.engine.hooks import owner_of_hooks
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.module_hooks import ModuleHook
from megatron_offload.model_map.structure import layers_of

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


class NarrowAct(nn.Module):
    """Saves four tensors of half the size."""

    def forward(self, x):
        y = x[..., : 2 * WIDTH].clone().sin().cos().exp().tanh()
        return torch.cat((y, y), -1)


def test_a_row_offloads_as_many_tensors_in_each_call_of_its_site():
    net = by_turns()
    for layer in net.layers:
        layer.mlp.act, layer.mlp.drop = NarrowAct(), nn.Identity()
    assert offloaded(net, 2) == [4 * 2 * 8 * (4 + 2) * WIDTH * 4] * 3


def test_what_is_recomputed_in_front_of_a_site_is_dropped_where_two_of_its_tensors_are_offloaded():
    def change(layer):
        layer.forward = lambda x: x + layer.mlp(layer.norm(x))

    rows = [{"site": "mlp", "offload": 2}, {"site": "norm", "recompute": True}]
    does = check(partial(changed_net, change), rows, (8, 8), **AT_ONCE).last_step.by_name["mlp"]
    assert does.recomputed_bytes == 4 * 2 * 8 * WIDTH * 4


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


def net_of(layers, *before):
    """Return a net of these layers, which has some modules under other names first."""
    net = make_net(0)
    net._modules = {f"own{i}": x for i, x in enumerate(before)} | net._modules
    net.layers = nn.ModuleList(layers)
    return net


def named_before():
    layers = make_net().layers
    return net_of(layers, layers[0], layers[3])


def named_in_halves():
    layers = make_net().layers
    return net_of(layers, nn.ModuleList(layers[::2]))


def by_turns():
    first, second = make_net(2).layers
    return net_of([first, second] * 2)


def of_shared_mlps():
    net = make_net()
    for layer in net.layers:
        layer.mlp = net.layers[0].mlp
    return net


@pytest.mark.parametrize(
    ("make", "layers", "share"),
    [
        (named_before, "all", 4),
        (named_before, "0-1", 2),
        (named_before, "3", 1),
        (named_in_halves, "all", 4),
        (named_in_halves, "2-3", 2),
        (by_turns, "0-3", 4),
        (by_turns, "2", 2),
        (of_shared_mlps, "2-3", 2),
    ],
)
def test_layers_that_have_several_names_are_offloaded_once_and_whole(make, layers, share):
    rows = [{"site": "layer", "layers": layers, "offload": "all"}]
    stats = check(make, rows, (8, 8), **AT_ONCE).last_step
    assert stats.num_groups == share
    whole = check(make_net, [{"site": "layer", "offload": "all"}], (8, 8), **AT_ONCE).last_step
    assert 4 * stats.offloaded_bytes == share * whole.offloaded_bytes


def test_a_row_is_told_under_which_name_a_module_is_a_site():
    row = {"site": "mlp", "layers": "1-3", "offload": "all"}
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp is layers\.0\.mlp again"):
        around(of_shared_mlps(), [row])


def test_blocks_stay_layers_where_a_second_list_has_what_holds_them():
    stages = [nn.Sequential(*make_net(2).layers) for _ in range(2)]
    layers = layers_of(dict(net_of(stages, *stages).named_modules()))
    assert layers == {"own0.0": 0, "own0.1": 1, "own1.0": 0, "own1.1": 1}


class InOneList(nn.Module):
    """Holds its only layer as ALBERT does, which calls it again and again."""

    def __init__(self, layer):
        super().__init__()
        self.inner = nn.ModuleList([layer])

    def forward(self, x):
        return self.inner[0](x)


def test_an_only_layer_is_one_and_each_of_its_calls_has_what_its_row_says():
    def make():
        (layer,), net = make_net(1).layers, make_net(0)
        net.groups, net.heads = nn.ModuleList([InOneList(layer)]), nn.Sequential(Mlp())
        del net.layers
        object.__setattr__(net, "layers", [net.groups[0]] * 4)
        return net

    assert layers_of(dict(make().named_modules())) == {"groups.0.inner.0": 0}
    stats = check(make, [{"site": "mlp", "offload": 2}], (8, 8), **AT_ONCE).last_step
    assert stats.offloaded_bytes == 4 * 2 * 2 * 8 * 4 * WIDTH * 4


def test_layers_may_be_in_a_dictionary_by_number_of_that_name():
    first, second = make_net(2).layers
    heads, dated = {"0": Mlp(), "1": Mlp()}, {"20240101": Mlp(), "20240102": Mlp()}
    net = net_of([], nn.ModuleDict(heads), nn.ModuleDict({"layers": nn.ModuleDict(dated)}))
    assert layers_of(dict(net.named_modules())) == {}
    net.layers = nn.ModuleDict({"4": first, "5": second})  # torchtitan's, of a later stage
    assert layers_of(dict(net.named_modules())) == {"layers.4": 4, "layers.5": 5}
