"""Layers, MLPs and attentions that are not recomputed: what is said, and what is left."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
from attentive_net import WIDTH, around, check, make_net
from programs import assert_same, take_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import CorruptionError, InPlaceModificationError, StateError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.recompute import proof, sites


@pytest.mark.parametrize("makes_other_bits", [False, True])
def test_a_run_s_own_rows_ask_the_bits_where_a_thread_may_have_drawn_numbers(
    makes_other_bits, caplog
):
    """A thread that draws while the forward runs, or the site itself: no error unasked."""

    def draw(layer):
        return 1.0 + makes_other_bits * random.random()

    expected, net = take_steps(make_net(draw)), make_net(draw)
    context = get_act_offloading_ctx_manager(net, config=OffloadConfig(rows=[]), min_offload_size=1)
    context.manager.follow_rows([RowConfig(site="layer", recompute=True)], is_own=True)
    adopt_model(net, context.manager, groups=context._groups)
    found = take_steps(net, context)
    if makes_other_bits:
        assert "it has had other bits when it ran again" in caplog.text
    else:
        assert_same(expected, found)


def test_a_site_that_computes_other_bits_is_named_before_a_gradient_is_wrong():
    net = make_net(lambda _: next(_NUMBERS))
    with pytest.raises(CorruptionError, match=r"layers\.2 was recomputed with other bits.*'layer'"):
        take_steps(net, around(net, "layer"))
    assert net.layers[0].mlp[0].weight.grad is None


_NUMBERS = iter(np.random.default_rng(0).random(10_000).tolist())


def test_a_site_that_saves_other_tensors_is_named():
    def other(layer, seen=[]):  # noqa: B006 - what it has seen is the point
        seen.append(1)
        return layer.norm.weight.exp() if len(seen) > 3 else 2.0

    net = make_net(other)
    with pytest.raises(StateError, match=r"layers\.2 saved other tensors"):
        take_steps(net, around(net, "layer"), lengths=(8,))


def test_a_parameter_changed_between_forward_and_backward_is_an_error():
    def change(net, begins):
        with torch.no_grad():
            net.layers[1].attn.in_proj_bias.add_(float(begins))

    net = make_net()
    with pytest.raises(InPlaceModificationError, match=r"layers\.1"):
        take_steps(net, around(net, "layer"), meanwhile=change)


class Norm(nn.Module):
    """A batch norm over the last dimension, and a counter of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.count = nn.BatchNorm1d(WIDTH), torch.zeros(1)

    def forward(self, x):
        self.count += 1
        return self.norm(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_site_that_writes_to_its_buffers_is_kept_from_its_second_call_on(is_late, caplog):
    found = []
    for has_context in (False, True):
        net = make_net()
        norms = [Norm() for _ in net.layers]
        context = around(net, "layer") if has_context and is_late else None
        for layer, norm in zip(net.layers, norms, strict=True):
            layer.mlp.append(norm)
        if has_context and not is_late:
            context = around(net, "layer")
        found.append([*take_steps(net, context), *net.buffers(), *(norm.count for norm in norms)])
    assert_same(*found)
    assert "writes to its buffers or other tensors" in caplog.text


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("kind", ["layer", "layers.*.mlp.2"])
def test_in_a_captured_graph_only_what_draws_nothing_is_recomputed(kind, draws, monkeypatch):
    """A rerun would draw other numbers there: no state of them can be read or set."""
    nets = make_net(), make_net()
    for layer in (layer for net in nets for layer in net.layers):
        layer.mlp[2].p = layer.attn.dropout = 0.1 * draws
    context = around(nets[1], kind, policy="modules")
    assert_same(take_steps(nets[0], None, (8,)), take_steps(nets[1], context, (8,)))
    monkeypatch.setattr(sites, "are_captured", lambda devices: True)
    assert_same(take_steps(nets[0], None, (8,)), take_steps(nets[1], context, (8,)))
    context.end_step()
    assert bool(context.last_step.recomputed_bytes) is (kind == "layer" and not draws)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_forward_of_a_site_that_raises_leaves_no_hooks(error):
    def stop(_):
        raise error

    net = make_net()
    context = around(net, "layer")
    net.layers[1].factor = stop
    with pytest.raises(error), context:
        net(torch.randint(50, (2, 8)))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    net.layers[1].factor = None
    assert_same(take_steps(make_net()), take_steps(net, context))


def test_a_site_with_hooks_inside_is_kept_and_says_so_once(caplog):
    expected = take_steps(make_net())
    net, seen = make_net(), []
    net.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):  # contexts for the same net
        assert_same(expected, take_steps(net, around(net, "layer")))
    (text,) = (r.getMessage() for r in caplog.records if "layers.0" in r.getMessage())
    assert "layers.0, and maybe others, is kept: a part of it has hooks; it may be off" in text
    assert len(seen) == 6


def test_a_part_that_is_given_a_hook_before_its_rerun_is_an_error():
    net = make_net()
    context = around(net, "layer")
    take_steps(net, context)  # in the first of which its bits are proven
    with context:
        loss = net(torch.randint(50, (2, 8))).square().mean()
    net.layers[0].mlp.register_forward_hook(lambda module, args, output: 3 * output)
    with pytest.raises(StateError, match=r"a part of layers\.0 was given hooks since its forward"):
        loss.backward()


def test_a_site_inside_a_checkpoint_of_the_user_is_left_to_him():
    def make():
        net = make_net()
        for layer in net.layers:
            run = layer.forward
            layer.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
        return net

    _, context = check(make, "mlp")
    assert context.last_step.by_name["mlp"].recomputed_bytes == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["layer", "mlp", "layers.*.mlp.2"])
def test_compiled_parts_of_a_layer_keep_their_bits_and_say_so(kind, caplog):
    def make():
        torch._dynamo.reset()
        net = make_net()
        for layer in net.layers:
            layer.mlp.compile(backend="inductor")
        return net

    check(make, kind)
    assert ("is kept: it is compiled" in caplog.text) is (kind != "layer")


def test_an_activation_that_a_layer_has_as_an_attribute_goes_when_the_next_comes():
    alive = []

    def note(layer):
        layer.seen = layer.norm.weight.exp()
        alive.append(weakref.ref(layer.seen))
        return layer.seen

    net, most = make_net(note), 0
    context = around(net, "layer")
    for _ in range(4):
        with context:
            loss = net(torch.randint(50, (2, 8))).sum()
        most = max(most, sum(one() is not None for one in alive))
        loss.backward()
    assert most == len(net.layers)


def test_a_kind_of_site_that_no_module_is_says_so(caplog):
    get_act_offloading_ctx_manager(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        config=OffloadConfig(recompute="layer"),
        warn_if_no_head=False,
    )
    assert "no module here is a site of kind 'layer'" in caplog.text


class WrittenLater(nn.Module):
    """Begins to write to what its norm returns, in a way that no counter shows."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.writes = nn.LayerNorm(64), nn.Linear(64, 64), False

    def forward(self, x):
        y = self.norm(x)
        if self.writes:
            y.data.mul_(2)
        return x + self.inner(y)


def test_under_another_manager_outputs_are_proven_from_its_first_steps_on(monkeypatch):
    monkeypatch.setattr(proof, "PROVE_EVERY", 4)
    torch.manual_seed(0)
    net, x = nn.Sequential(WrittenLater(), WrittenLater()), torch.randn(4, 16, 64)

    def gradient(context):
        with context:
            loss = net(x).square().sum()
        loss.backward()
        found = net[0].inner.weight.grad
        net.zero_grad()
        return found

    rows = {"rows": [{"site": "norm", "recompute": True}], "min_tensor_bytes": 0}
    first = get_act_offloading_ctx_manager(net, config=OffloadConfig(**rows))
    for _ in range(7):
        gradient(first)
    for layer in net:
        layer.writes = True
    expected = gradient(contextlib.nullcontext())
    config = OffloadConfig(**rows, max_inflight_bytes="1MiB")
    second = get_act_offloading_ctx_manager(net, config=config)
    for _ in range(3):
        assert torch.equal(gradient(second), expected)


def second_put():
    calls = iter(range(1000))
    return lambda name, event, _: (event, name) == ("call", "ModuleLayout.put") and next(calls) == 1


def entered_vmap():
    return lambda name, event, what: (
        (event, what) == ("c_return", torch._C._vmapmode_increment_nesting)
        or (event, name) == ("return", "_vmap_level")  # inside it no interrupt comes
    )


@pytest.mark.parametrize("make", [second_put, entered_vmap])
def test_an_interrupt_in_a_rerun_leaves_modules_and_vmap_as_they_were(make):
    net, is_then = make_net(), make()
    for layer in net.layers:
        layer.notes = [0.5]
    own = [layer.notes for layer in net.layers]
    context = get_act_offloading_ctx_manager(net, config=OffloadConfig(recompute="layer"))
    take_steps(net, context)

    def interrupt(frame, event, arg):
        if is_then(frame.f_code.co_qualname, event, arg):
            raise KeyboardInterrupt  # no more calls are looked at

    with context:
        loss = net(torch.randint(50, (2, 8))).sum()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        sys.setprofile(None)
    assert all(layer.notes is notes for layer, notes in zip(net.layers, own, strict=True))
    torch.ones(1, requires_grad=True).sum().backward()
