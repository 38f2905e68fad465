"""Layers, MLPs and attentions that are recomputed as a whole have the same bits."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attentive_net import KINDS, WIDTH, Block, Net, around, check, make_net
from programs import assert_same, take_steps, twice
from torch import nn

from megatron_offload.errors import StateError
from megatron_offload.model_map.module_hooks import named_modules
from megatron_offload.recompute.sites import sites_of


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


def freeze(net, begins):
    for layer in net.layers:
        layer.mlp[0].weight.requires_grad_(not begins)


def unfreeze(net, begins):
    for layer in net.layers:
        layer.mlp[0].weight.requires_grad_(begins)


@pytest.mark.parametrize(
    "meanwhile",
    [
        change_numbers,
        lose_attributes,
        draw_numbers,
        exchange_parts,
        exchange_for_the_next,
        freeze,
        unfreeze,
    ],
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


class Graded(Block):
    """Takes a gradient through its own parts in its forward."""

    def forward(self, x):
        own = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.mlp(own).sum(), own)
        return super().forward(x) + gradient


@pytest.mark.parametrize("kind", [Late, Locked, Halved, Graded])
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
class Latent(Net):
    """Gives its first layer a parameter, and the others what that has made."""

    def forward(self, tokens):
        x = self.embedding.weight
        for layer in self.layers:
            x = layer(x[None])[0]
        return self.head(x[tokens])


def test_a_site_may_be_given_a_parameter():
    check(partial(make_net, kind=Latent), "layer")


def test_nested_sites_are_right_while_steps_are_looked_at():
    check(make_net, ["layer", "mlp"], lengths=3 * (8, 11))


def test_a_layer_may_begin_with_a_compiled_part():
    layers = [nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.GELU()) for _ in range(2)]
    assert sorted(sites_of(named_modules(nn.ModuleList(layers)), ["layer"])) == ["0", "1"]


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
