"""Layers, MLPs and attentions that are recomputed as a whole: bits, refusals, what is dropped."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs import assert_same, take_steps, twice
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import CorruptionError, InPlaceModificationError, StateError
from megatron_offload.frontends.adopt import adopt_model
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.model_map.module_hooks import named_modules
from megatron_offload.model_map.structure import find_sites
from megatron_offload.recompute import proof, sites

WIDTH = 32
KINDS = (("layer",), ("mlp",), ("attention",), ("mlp", "attention"), ("layer", "mlp", "norm"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.scale = 0.5
        self.factor = None
        self.inside = None

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        inside = x * self.scale
        self.inside = StorageRef(inside.untyped_storage())
        y = self.mlp(inside.sin()) * 0.1
        if self.factor is not None:
            y = y * self.factor(self)
        # x is read twice in here and once outside: gradients are summed in the graph's order.
        return x * y + x


class Net(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) + first
        return self.head(x)


def make_net(factor=None, kind=Net):
    torch.manual_seed(0)
    net = kind()
    for layer in net.layers:
        layer.factor = factor
    return net


def around(net, kinds, **settings):
    config = OffloadConfig(recompute=kinds, **settings)
    return get_act_offloading_ctx_manager(net, config=config, min_offload_size=1)


def check(make, kinds, lengths=(8, 11, 8), settings=None, **how):
    """Compare the steps of a net with sites to those without; return the net and its context."""
    expected, net = take_steps(make(), None, lengths, **how), make()
    context = around(net, kinds, **settings or {})
    assert_same(expected, take_steps(net, context, lengths, **how))
    return net, context


@pytest.mark.parametrize("settings", [{}, {"policy": "modules"}, {"checking": True}], ids=str)
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_sites_recomputed_in_a_model_keep_its_bits(kinds, settings):
    _, context = check(make_net, kinds, settings=settings)
    context.end_step()
    by_name = context.last_step.by_name
    assert by_name[kinds[0]].recomputed_bytes > 0
    if kinds[0] == "layer":
        assert by_name["mlp"].recomputed_bytes == 0, "the outer site has it"


class Chain(Net):
    """What a layer returns is what the next one is given."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_some_of_the_layers_are_recomputed_by_their_numbers():
    net, context = check(
        partial(make_net, kind=Chain), "layers.0-1", settings={"policy": "modules"}
    )
    with context:
        loss = net(torch.randint(50, (2, 8))).sum()
    assert [layer.inside.expired() for layer in net.layers] == [True, True, False]
    groups = context.manager.decisions.committed
    assert not any(group.dropped_bytes for group in groups), "a layer's input is kept or offloaded"
    loss.backward()
    loss = net(torch.randint(50, (2, 8))).sum()
    assert not any(layer.inside.expired() for layer in net.layers), "outside the context"
    loss.backward()


@pytest.mark.by_default
@pytest.mark.parametrize("kind", ["layer", "mlp", "attention"])
def test_sites_are_recomputed_where_nothing_is_offloaded_too(kind):
    net, context = check(make_net, kind, lengths=4 * (8, 11))
    assert not context.manager.may_record
    tokens = torch.randint(50, (2, 8))
    with context:
        loss = net(tokens).sum()
    assert context.last_step.by_name[kind].recomputed_bytes > 0
    assert net.layers[0].inside.expired() == (kind == "layer")
    loss.backward()


def by_autograd(loss):
    loss.backward(create_graph=True)


@pytest.mark.parametrize("backward", [twice, by_autograd])
def test_a_site_whose_graph_is_read_twice_has_the_same_bits(backward):
    check(make_net, "layer", backward=backward)


def as_batched_gradients(losses, parameters):
    return torch.autograd.grad(losses, parameters, torch.eye(len(losses)), is_grads_batched=True)


def under_vmap(losses, parameters):
    return torch.func.vmap(partial(torch.autograd.grad, losses, parameters))(torch.eye(len(losses)))


@pytest.mark.parametrize("backward", [as_batched_gradients, under_vmap])
@pytest.mark.parametrize("kinds", ["layer", "**.mlp.0"])
def test_what_runs_again_for_a_batch_of_gradients_has_none(kinds, backward):
    results = []
    for net, is_on in ((make_net(), False), (make_net(), True)):
        context = around(net, kinds, policy="modules") if is_on else contextlib.nullcontext()
        torch.manual_seed(1)
        for _ in range(2):  # in the first all is compared
            with context:
                losses = net(torch.randint(50, (2, 8))).square().mean((1, 2))
            results.append([*backward(losses, [*net.parameters()]), torch.rand(1)])
            del losses
    for expected, found in zip(results[:2], results[2:], strict=True):
        assert_same(expected, found)
    assert context.end_step()
    assert context.last_step.recomputed_bytes > 0


def change_numbers(net, begins):
    for layer in net.layers:
        layer.scale = 7.0 if begins else 0.5


def lose_attributes(net, begins):
    for layer in net.layers:
        if begins:
            del layer.scale
            layer.new = 1
        else:
            layer.scale = 0.5
            del layer.new


def draw_numbers(net, begins):
    torch.rand(3)


def exchange_parts(net, begins, kept=[]):  # noqa: B006 - what is put back
    for layer in net.layers:
        if begins:
            kept.append((layer.mlp[1], layer.mlp[3].weight))
            layer.mlp[1], layer.mlp[3].weight = nn.ReLU(), nn.Parameter(torch.zeros(32, 128))
            layer.norm.register_buffer("new", torch.zeros(1))
            layer.training = False
        else:
            layer.mlp[1], layer.mlp[3].weight = kept.pop(0)
            del layer.norm.new
            layer.training = True


def exchange_for_the_next(net, begins, kept=[]):  # noqa: B006 - what keeps its identity
    """Leave the number and the classes of all parts as they are."""
    change_numbers(net, begins)
    first, second, third = net.layers
    for layer in net.layers:
        layer.mlp[2].p = 0.9 if begins else 0.1
    if not begins:
        first.mlp, second.mlp = second.mlp, first.mlp
        first.mlp[1], net.layers[2] = nn.GELU(), copy.copy(third)
        kept.append(third)


@pytest.mark.parametrize(
    "meanwhile",
    [change_numbers, lose_attributes, draw_numbers, exchange_parts, exchange_for_the_next],
)
def test_what_changes_between_forward_and_backward_changes_no_bit_of_a_site(meanwhile):
    check(make_net, "layer", meanwhile=meanwhile)


def put_an_equal_one(layer, begins):
    layer.flag = 1 if begins else True


def empty_a_list(layer, begins):
    if not begins:
        layer.flag = [1]
    elif layer.flag:
        layer.flag.clear()


@pytest.mark.parametrize("change", [put_an_equal_one, empty_a_list])
def test_an_attribute_that_was_none_is_what_it_has_become(change):
    def make():
        net = make_net(lambda layer: 2.0 if layer.flag is True or layer.flag == [1] else 1.0)
        for layer in net.layers:
            layer.flag = None
        return net

    def meanwhile(net, begins):
        for layer in net.layers:
            change(layer, begins)

    check(make, "layer", meanwhile=meanwhile)


def count_in_a_tensor(layer):
    layer.state[0] += 1
    return 2.0


def draw_from_its_own(layer):
    return torch.rand((), generator=layer.state)


STATES = {
    count_in_a_tensor: (lambda: [torch.zeros(())], list),
    draw_from_its_own: (torch.Generator, lambda state: state.get_state().tolist()),
}


@pytest.mark.parametrize("factor", STATES)
def test_what_a_site_counts_or_changes_in_place_is_changed_by_forwards_alone(factor):
    make_state, read = STATES[factor]
    nets = []

    def make():
        nets.append(make_net(factor))
        for layer in nets[-1].layers:
            layer.state = make_state()
        return nets[-1]

    check(make, "layer", backward=twice)
    states = [[read(layer.state) for layer in net.layers] for net in nets]
    assert states[0] == states[1]


class FrozenDict(dict):
    def __reduce_ex__(self, protocol):
        raise TypeError


class Scale(nn.Parameter):
    def halved(self):
        return self * 0.5


class Scaled(nn.Module):
    """Has what can't be copied by its class alone, a flag that is a property, a compiled part."""

    def __init__(self):
        super().__init__()
        self.scale, self.config = Scale(torch.rand(WIDTH)), FrozenDict(factor=2.0)
        self.part = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")

    training = property(lambda self: True, lambda self, value: None)

    def forward(self, x):
        return (self.part(x) * self.scale.halved() * self.config["factor"]).sin()


@pytest.mark.parametrize("kind", ["layer", "layers.*.mlp"])
def test_a_site_may_have_what_is_of_classes_of_its_own(kind):
    def make():
        net = make_net()
        for layer in net.layers:
            layer.mlp = Scaled()
        return net

    _, context = check(make, kind)
    context.end_step()
    assert context.last_step.by_name[kind].recomputed_bytes > 0


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_site_that_draws_other_random_numbers_is_refused_in_that_forward(draw, is_late):
    net = make_net(lambda layer: draw() if layer.scale == 7.0 else 1.0)
    context = around(net, "layer")
    if is_late:
        take_steps(net, context)
    change_numbers(net, True)
    with pytest.raises(StateError, match=r"layers\.0 draws random numbers of Python or numpy"):
        take_steps(net, context)


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


class Late(Block):
    """Ends in a kernel that fills what is saved behind that."""

    def __init__(self):
        super().__init__()
        self.last = nn.RReLU()

    def forward(self, x):
        return self.last(super().forward(x))


class Locked(Block):
    """Draws a mask in its first forward, and makes its scale there."""

    def __init__(self):
        super().__init__()
        self.mask = self.scale_layer = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.rand(WIDTH)
        if self.scale_layer is None:
            torch.manual_seed(3)
            self.scale_layer = nn.Linear(WIDTH, WIDTH)
        return super().forward(x) * self.mask + self.scale_layer(x)


class Halved(Block):
    """Calls itself with each half of its batch."""

    def forward(self, x):
        if len(x) > 1:
            return torch.cat([self(half) for half in x.split(1)])
        return super().forward(x)


@pytest.mark.parametrize("kind", [Late, Locked, Halved])
def test_a_site_of_unusual_layers_keeps_its_bits(kind):
    def make():
        net = make_net()
        net.layers = nn.ModuleList(kind() for _ in range(3))
        return net

    def forget(net, begins):
        for layer in net.layers:
            layer.mask = None

    check(make, "layer", meanwhile=forget if kind is Locked else None)


@pytest.mark.by_default
def test_nested_sites_are_right_while_steps_are_looked_at():
    check(make_net, ["layer", "mlp"], lengths=3 * (8, 11))


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
    assert_same(expected, take_steps(net, around(net, "layer")))
    (text,) = (r.getMessage() for r in caplog.records if "layers.0" in r.getMessage())
    assert "layers.0, and maybe others, is kept: a part of it has hooks" in text
    assert len(seen) == 3


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


def test_a_layer_may_begin_with_a_compiled_part():
    layers = [nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.GELU()) for _ in range(2)]
    assert sorted(find_sites(named_modules(nn.ModuleList(layers)), ["layer"])) == ["0", "1"]


def test_a_kind_of_site_that_no_module_is_says_so(caplog):
    get_act_offloading_ctx_manager(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        config=OffloadConfig(recompute="layer"),
        warn_if_no_head=False,
    )
    assert "no module here is a site of kind 'layer'" in caplog.text


class Given(torch.autograd.Function):
    """Has a saved constant as the gradient of its first argument."""

    @staticmethod
    def forward(ctx, own, constant):
        ctx.save_for_backward(constant)
        return own.new_ones(())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def test_a_constant_that_a_backward_returns_is_taken_by_no_gradient():
    constant = torch.ones(WIDTH)
    net = make_net(lambda layer: Given.apply(layer.own, constant))
    for layer in net.layers:
        layer.own = nn.Parameter(torch.zeros(WIDTH))
    context = around(net, "layer")
    for _ in range(3):
        with context:
            loss = net(torch.randint(50, (2, 8))).sum()
        loss.backward()
    assert torch.equal(constant, torch.ones(WIDTH))
    assert all(torch.equal(layer.own.grad, torch.full((WIDTH,), 3.0)) for layer in net.layers)


NOTED = []
ROUTERS = {
    "0.16": (
        SimpleNamespace(save_to_aux_losses_tracker=NOTED.append),
        lambda router: router.save_to_aux_losses_tracker(1),
    ),
    "0.19": (
        SimpleNamespace(get_moe_metrics_tracker=lambda: SimpleNamespace(record=NOTED.append)),
        lambda router: router.get_moe_metrics_tracker().record(1),
    ),
}


@pytest.mark.parametrize("version", ROUTERS)
def test_an_auxiliary_loss_of_megatron_is_noted_once(version, monkeypatch):
    router, note = ROUTERS[version]
    NOTED.clear()
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", router)

    def route(layer):
        note(router)
        return 1.0

    net = make_net(route)
    take_steps(net, around(net, "layer"), lengths=(8, 11))
    assert len(NOTED) == 2 * len(net.layers)


class WrittenLater(nn.Module):
    """Begins to write to what its norm returns, in a way that nobody is reported."""

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
