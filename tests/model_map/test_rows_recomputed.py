"""Outputs that rows recompute: who saves them is in no group."""

from __future__ import annotations

import contextlib
import gc
import types
from functools import partial

import pytest
import torch
from programs import assert_same, make_manager, take_steps, twice
from small_net import AT_ONCE, WIDTH, around, changed_net, check, make_net
from torch import nn

from megatron_offload import offload_modules
from megatron_offload.errors import CorruptionError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.module_hooks import ModuleHook
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.recompute.recipe import FunctionRecipe

NORMS = [{"site": "norm", "recompute": True}]


class Given(torch.autograd.Function):
    """Has what it saves as the gradient of its first argument."""

    @staticmethod
    def forward(ctx, own, saved):
        ctx.save_for_backward(saved)
        return own.sum() * saved.sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved, None


class Reader(nn.Module):
    """Saves what it is given, and as a constant that is the gradient of its parameter."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2, 8, WIDTH))

    def forward(self, x):
        return x.sin() + Given.apply(self.own, x.detach())


def reader_net(norms_train=True):
    def change(layer):
        layer.mlp = Reader()
        layer.norm.requires_grad_(norms_train)
        layer.forward = types.MethodType(lambda self, x: x + self.mlp(self.norm(x)), layer)

    return changed_net(change)


@pytest.mark.parametrize("settings", [{}, {"checking": True}], ids=str)
@pytest.mark.parametrize("norms_train", [True, False])
def test_what_saves_outputs_that_rows_recompute_is_in_no_group(norms_train, settings):
    net, steps = reader_net(norms_train), partial(take_steps, backward=twice)
    context = around(net, NORMS, **settings)
    assert_same(steps(reader_net(norms_train)), steps(net, context))
    context.end_step()
    step = context.last_step
    assert (step.num_groups, step.by_name["norm"].recomputed_bytes) == (0, 4 * 2 * 8 * WIDTH * 4)


def test_what_sites_return_and_what_whole_layers_do_has_spans_in_a_trace():
    rows = [{"site": "norm", "recompute": True, "layers": "0-1"}]
    rows += [{"site": "layer", "recompute": True, "layers": 2}]
    net = make_net()
    context = around(net, rows, simulated={"host_time": True})
    take_steps(net, context)
    with trace_step(context.manager) as trace:
        take_steps(net, context, (8,))
    found = [span.label for span in trace.spans if span.kind == "recompute"]
    assert found == ["layers.2", "norm", "norm"]


def test_a_norm_s_call_that_an_interrupt_has_ended_is_not_kept_for_good(monkeypatch):
    net, given, layer_norm = make_net(), [], nn.functional.layer_norm
    context = around(net, NORMS)
    take_steps(net, context)

    def interrupt(x, *_):
        given.append(StorageRef(x.untyped_storage()))
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.functional, "layer_norm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        take_steps(net, context)
    monkeypatch.setattr(nn.functional, "layer_norm", layer_norm)
    take_steps(net, context, (8,))
    gc.collect()
    assert given[0].expired()


class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Identity()

    def forward(self, x):
        return x.sin() * x.sin().square()


def test_memory_that_a_site_saves_twice_counts_once():
    def change(layer):
        layer.mlp = Sines()

    stats = check(partial(changed_net, change), [{"site": "mlp", "recompute": True}]).last_step
    assert stats.recomputed_bytes == 4 * 4 * 2 * 8 * WIDTH * 4  # x, both sines, and the square
    assert "at most 32.0 KiB of activations were saved, 32.0 KiB of them off" in stats.verdict


@pytest.mark.parametrize("offload", ["all", 1])
def test_an_output_is_dropped_too_where_one_of_its_readers_is_offloaded(offload):
    stats = check(make_net, [{"site": "q", "offload": offload}, *NORMS], **AT_ONCE).last_step
    assert (stats.recomputed_bytes, stats.offloaded_bytes) == (4 * 2 * 8 * WIDTH * 4, 0)
    assert stats.refused_recipe_bytes == {}


def test_a_norm_that_keeps_nothing_for_its_own_backward_is_not_recomputed(caplog):
    def change(layer):
        layer.norm.requires_grad_(False)
        layer.forward = lambda x: x + layer.q(layer.norm(x.detach())).sin()

    stats = check(partial(changed_net, change), NORMS, **AT_ONCE).last_step
    assert stats.recomputed_bytes == 0, "its input would be held in place of its output"
    assert "it doesn't save what it takes" in caplog.text


def test_a_backward_forgets_what_its_forward_has_noted():
    net, manager = reader_net(), make_manager(rows=NORMS)
    adopt_model(net, manager)
    for _ in range(2):
        with manager.step():
            chunk = manager.begin_chunk()
            loss = net(torch.randint(50, (2, 8))).sum()
            assert chunk.recipes or manager.step_number == 1  # which is watched
            loss.backward()
            assert not chunk.recipes


def test_what_saves_such_outputs_may_be_marked_as_a_group_too():
    net, manager = reader_net(), make_manager(rows=NORMS)
    offload_modules(net, ["layers.*.mlp"], manager=manager)
    for _ in range(3):
        with manager.step():
            manager.begin_chunk()
            net(torch.randint(50, (2, 8))).sum().backward()
    assert manager.last_step.by_name["norm"].recomputed_bytes == 4 * 2 * 8 * WIDTH * 4


@pytest.mark.parametrize("settings", [{}, {"checking": True}], ids=str)
def test_an_output_of_other_bits_is_said_in_checking_mode(settings, monkeypatch):
    net, is_wrong = reader_net(), []
    context = around(net, NORMS, **settings)
    take_steps(net, context)
    own = torch.layer_norm
    monkeypatch.setattr(torch, "layer_norm", lambda *given: own(*given) + len(is_wrong))
    expects = pytest.raises(CorruptionError, match="norm returns was recomputed with other bits")
    with expects if settings else contextlib.nullcontext():
        take_steps(net, context, (8,), meanwhile=lambda *_: is_wrong.append(1))


class Readers(nn.Module):
    """Saves its input in three parts of its own; ``meanwhile`` is called behind the first."""

    def __init__(self, meanwhile=lambda x: None):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.meanwhile = meanwhile

    def forward(self, x):
        y = self.first(x).sin()
        self.meanwhile(x)
        return y * self.second(x).sin() * self.third(x).sin()


def readers_net(meanwhile=lambda x: None):
    def change(layer):
        layer.mlp = Readers(meanwhile)
        layer.forward = types.MethodType(lambda self, x: x + self.mlp(self.norm(x)), layer)

    return changed_net(change)


@pytest.mark.parametrize("reader", ["first", "third"])
def test_an_output_that_groups_and_others_save_is_dropped_and_counted_once(reader):
    rows = [*NORMS, {"site": f"mlp.{reader}", "offload": 1}]
    expected, net, made, kept = take_steps(readers_net()), readers_net(), [], []
    context = around(net, rows, **AT_ONCE)
    assert_same(expected, take_steps(net, context))
    for layer in net.layers:
        hook = ModuleHook(lambda *given: made.append(StorageRef(given[-1].untyped_storage())))
        layer.norm.register_forward_hook(hook)

    def look(*_):
        found = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in made)
        kept.append(sum(storage.nbytes() for storage in found if storage is not None))

    take_steps(net, context, (8,), meanwhile=look)
    assert (len(made), kept) == (4, [0, 0]), "behind the forward, and the backward"
    context.end_step()
    assert context.last_step.recomputed_bytes == 4 * 2 * 8 * WIDTH * 4


def test_an_output_that_is_refused_to_several_counts_once(monkeypatch):
    net = readers_net()
    context = around(net, [*NORMS, {"site": "mlp.third", "offload": 1}], **AT_ONCE)
    take_steps(net, context)
    monkeypatch.setattr(FunctionRecipe, "bind", lambda *_, **__: "no")
    take_steps(net, context, (8,))
    context.end_step()
    assert context.last_step.refused_recipe_bytes == {"no": 4 * 2 * 8 * WIDTH * 4}


def test_what_is_written_to_unseen_between_two_who_save_it_is_an_error_and_not_wrong():
    writes = []
    net = readers_net(lambda x: x.data.add_(1) if writes else None)
    context = around(net, NORMS)
    take_steps(net, context, (8,))  # which is watched
    writes.append(1)
    with pytest.raises(CorruptionError, match="norm returns was recomputed with other bits"):
        take_steps(net, context, (8,))


@pytest.mark.parametrize("keeps", [False, True])
def test_an_output_that_something_keeps_is_read_where_it_is_and_is_refused(keeps, monkeypatch):
    net, kept, calls, own = readers_net(), [], [], torch.layer_norm
    for layer in net.layers if keeps else ():
        layer.norm.register_forward_hook(ModuleHook(lambda *given: kept.append(given[-1])))
    context = around(net, NORMS)
    take_steps(net, context)
    monkeypatch.setattr(torch, "layer_norm", lambda *given: calls.append(given) or own(*given))
    take_steps(net, context, (8,))
    assert len(calls) == 4 * (1 if keeps else 2)
    context.end_step()
    step, num_bytes = context.last_step, 4 * 2 * 8 * WIDTH * 4
    assert step.recomputed_bytes == (0 if keeps else num_bytes)
    refused = {"something else keeps it alive": num_bytes}
    assert step.refused_recipe_bytes == (refused if keeps else {})
