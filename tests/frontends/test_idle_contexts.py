"""A context for each step, which is how it is documented where the name comes from."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading

import pytest
import torch
import zoo
from programs import assert_nothing_left, assert_same, make_config
from test_compile import Model
from test_whole_model import TIGHT, make_offload
from torch import nn

from megatron_offload import OffloadConfig
from megatron_offload.errors import StateError
from megatron_offload.frontends import whole_model
from megatron_offload.frontends.whole_model import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
)
from megatron_offload.memory.host_pool import HostPool

pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.fixture
def no_collector():
    whole_model._idle.clear()
    whole_model._allocated.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    whole_model._idle.clear()
    whole_model._allocated.clear()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def slab_bytes():
    pools = [one for one in gc.get_objects() if type(one) is HostPool]
    return sum(pool.stats.slab_bytes_total for pool in pools)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_context_for_each_step_takes_no_more_memory(is_named):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.ones(256, 64)
    config = OffloadConfig(host_slab_bytes="8MiB", max_inflight_bytes=0, prefetch_bytes=0)
    slabs, resident = [], []
    for step in range(50):
        context = OffloadActivations(config=config)
        with context if is_named else OffloadActivations(config=config):
            loss = net(x).square().sum()
        loss.backward()
        del loss
        resident.append(resident_bytes())
        if step in (2, 25, 49):
            slabs.append(slab_bytes())
    assert context.manager.last_step.offloaded_bytes > 0
    assert len(set(slabs)) == 1
    assert max(resident[2:]) - resident[2] < 8 << 20


def test_a_context_says_nothing_of_the_steps_of_one_before():
    x = torch.ones(256, 64)
    for size in (64, 32):  # of another model, in the memory of the first
        offload, net = OffloadActivations(config=make_config()), nn.Linear(64, size)
        assert offload.last_step.offloaded_bytes == 0
        with offload:
            loss = net(x).sigmoid().sum()
        loss.backward()
        assert 0 < offload.last_step.offloaded_bytes <= 256 * (64 + size) * 4
        del offload


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_bit_is_the_same_with_a_context_for_each_forward(name):
    config = make_config("late", **TIGHT)

    def context(model):
        return OffloadActivations(min_offload_size=0, config=config)

    order = "FFFBFBBB"
    assert_same(zoo.expected(name, order=order), zoo.train(name, context, order=order))
    (groups,) = whole_model._allocated.values()
    assert groups.end_step_if_over()
    assert groups.manager.last_step.offloaded_bytes > 0
    assert_nothing_left(groups.manager)


def test_contexts_that_exist_together_share_nothing():
    first, second = OffloadActivations(), OffloadActivations()
    assert first.manager is not second.manager
    other = []
    thread = threading.Thread(target=lambda: other.append(OffloadActivations().manager))
    left = first.manager
    del first
    thread.start()
    thread.join()
    assert other[0] is not left
    assert OffloadActivations(max_fwd_stash_size=6).manager is not left
    assert OffloadActivations(config=OffloadConfig(fraction=0.5)).manager is not left
    assert OffloadActivations().manager is left


@pytest.mark.parametrize("handled", [ValueError(), None], ids=repr)
def test_a_context_isn_t_closed_inside_of_itself_unless_an_exception_ends_it(handled):
    x, offload = torch.ones(64, 64, requires_grad=True), OffloadActivations(min_offload_size=1)

    def close_inside():
        with offload:
            y = x.sin()
            with pytest.raises(StateError, match=r"close\(\) inside of the context"):
                offload.close()
        y.sum().backward()

    try:
        if handled:
            raise handled
        close_inside()
    except ValueError:  # of before it was entered
        close_inside()
    assert torch.equal(x.grad, torch.ones(64, 64).cos())
    with pytest.raises(ZeroDivisionError), offload, contextlib.closing(offload):
        _ = x.sin() / (1 // 0)
    assert offload.manager.host_pool.is_closed


def test_what_was_closed_or_changed_by_hand_is_nobody_s_next():
    closed = OffloadActivations()
    closed.close()
    closed.close()
    changed = OffloadActivations()
    changed.manager.configure(OffloadConfig(fraction=0.5))
    managers = {closed.manager, changed.manager}
    off = OffloadActivations()
    off.manager.disable_offload()
    switched = off.manager
    del closed, changed, off
    first, second = OffloadActivations(), OffloadActivations()
    assert not {first.manager, second.manager} & managers
    assert first.manager is switched
    assert first.manager.do_offload


def test_other_settings_get_the_memory_that_nobody_uses():
    x = torch.ones(64, 64, requires_grad=True)
    config = OffloadConfig(host_slab_bytes="1MiB", max_inflight_bytes=0, prefetch_bytes=0)
    with OffloadActivations(config=config) as context:
        y = x.exp().exp().sum()
    pool = context.manager.host_pool
    del context
    OffloadActivations(config=config.model_copy(update={"fraction": 0.5}))
    assert pool.stats.slab_bytes_total > 0  # the graph is there yet
    y.backward()
    del y
    OffloadActivations(max_fwd_stash_size=7, config=config)
    assert pool.stats.slab_bytes_total == 0


def test_a_manager_without_owners_gives_its_memory_back():
    before = slab_bytes()
    for _ in range(3):
        offload = make_offload(**TIGHT)
        with offload:
            loss = torch.ones(64, 64, requires_grad=True).exp().exp().sum()
        loss.backward()
        del loss
        assert offload.end_step()
        assert slab_bytes() > before
        del offload
        assert slab_bytes() == before


@pytest.mark.parametrize(
    "what", [{"site": "mlp", "offload": "all"}, {"site": "mlp", "recompute": True}]
)
def test_of_two_contexts_for_one_model_each_frees_memory_in_its_own_forwards(what):
    model, x = Model(), torch.randn(8, 32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    contexts = [
        get_act_offloading_ctx_manager(
            model, config=make_config(rows=[what]), min_offload_size=0, warn_if_no_head=False
        )
        for _ in range(2)
    ]
    for number in range(6):
        context = contexts[number % 2]
        with context:
            loss = model(x).square().sum()
        assert_same(expected, torch.autograd.grad(loss, list(model.parameters())))
        del loss
        assert context.end_step()
        step = context.last_step
        assert step.offloaded_bytes + step.recomputed_bytes > 0
