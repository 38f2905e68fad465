"""Backwards that never come, come twice, or fail: nothing leaks, and the next step is right."""

from __future__ import annotations

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    check_steps,
    forward,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)
from torch.utils.checkpoint import checkpoint

from megatron_offload.backends.base import Wait
from megatron_offload.config import SimulatedConfig
from megatron_offload.core.profile import GroupKey
from megatron_offload.errors import StateError

ORDER = one_forward_one_backward(4, depth=2)


@pytest.mark.parametrize("timing", TIMINGS)
def test_changing_microbatch_counts_and_sequence_lengths_are_exact(timing):
    model, manager = make_model(), make_manager(timing)
    counts = [(4, 2, 16), (1, 1, 16), (6, 3, 16), (2, 2, 5), (4, 4, 64), (4, 2, 16)]
    for count, depth, rows in counts:
        order = one_forward_one_backward(count, depth)
        check_steps(model, manager, order, rows=rows)


@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_passes_shift_nothing(grad):
    model, manager = make_model(), make_manager(prefetch_bytes=24 * KIB)
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                forward(model, manager)
        check_steps(model, manager, ORDER)
    profile = manager.learner.profile
    run_step(model, manager, ORDER)
    assert manager.learner.profile == profile
    assert manager.last_step.num_late_reloads == 0


def test_a_device_that_watches_nothing_is_given_back_what_dropped_graphs_hold(monkeypatch):
    plain = SimulatedConfig(copy_timing="late", poison=False, check_hazards=False)
    manager = make_manager(simulated=plain)
    assert not manager.backend.observes
    loss = forward(make_model(), manager)
    assert manager.host_pool.stats.in_use_bytes > 0
    del loss
    assert manager.state_of()["host bytes"] == 0
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    records = [chunk.pack(group, torch.randn(256)) for _ in range(2)]
    chunk.close_group("g")
    manager.commit(group)
    manager.join_offloads()
    manager.enter_backward(group)
    waits, wait = [], manager.backend.wait
    monkeypatch.setattr(manager.backend, "wait", lambda *args: (waits.append(args[2]), wait(*args)))
    records.pop()
    manager.state_of()
    assert waits == [Wait.W4], "the copy must not write into memory that was handed on"
    records.pop()
    manager.state_of()
    assert waits == [Wait.W4], "which was waited for once"
    manager.reset()
    assert_nothing_left(manager)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("inflight_bytes", [0, 40 * KIB, 4096 * KIB])
def test_a_dropped_graph_leaves_nothing(timing, inflight_bytes):
    model = make_model()
    manager = make_manager(timing, max_inflight_bytes=inflight_bytes, prefetch_bytes=24 * KIB)
    loss = forward(model, manager)
    manager.flush_delayed_groups()
    assert manager.host_pool.stats.in_use_bytes > 0
    del loss
    assert manager.state_of()["host bytes"] == 0, "host memory goes with the graph"
    for _ in range(2):
        check_steps(model, manager, ORDER)
        forward(model, manager)  # before the next, which has learned an order


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(("is_whole", "times"), [(True, 0), (True, 2), (False, 2)])
def test_a_graph_that_outlives_its_step_keeps_its_data(is_whole, times, timing):
    model, manager = make_model(), make_manager(timing)
    parameters = list((model if is_whole else model[-1]).parameters())
    expected = torch.autograd.grad(forward(model, None), parameters)
    if not times:  # the step before was seen to its end
        assert_same(expected, torch.autograd.grad(forward(model, manager), parameters))
        manager.reset()
    loss = forward(model, manager)
    for _ in range(times):
        assert_same(expected, torch.autograd.grad(loss, parameters, retain_graph=True))
    manager.reset()
    run_step(model, manager, ORDER)
    assert_same(expected, torch.autograd.grad(loss, parameters))
    del loss
    assert_nothing_left(manager)


def test_a_backward_through_an_aborted_step_says_so():
    model, manager = make_model(), make_manager()
    loss = forward(model, manager)
    manager.abort()
    with pytest.raises(StateError, match="aborted"):
        loss.backward()


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_groups_inside_a_checkpoint_are_recomputed_and_counted(use_reentrant, timing, caplog):
    model, manager = make_model(), make_manager(timing, prefetch_bytes=0)

    def run(manager):
        x = torch.linspace(-1, 1, 512).view(16, 32).requires_grad_()
        if manager:
            manager.begin_chunk()
        x = model[0](x, manager)
        x = checkpoint(model[1], x, manager, use_reentrant=use_reentrant)
        x = model[2](x, manager)
        model.zero_grad()
        x.square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = run(None)
    for _ in range(2):
        assert_same(expected, run(manager))
        manager.reset()
        assert_nothing_left(manager)
        assert manager.last_step.num_hidden_groups == 2
    assert manager.last_step.offloaded_bytes > 0
    assert caplog.text.count("'norm' is offloaded, as it runs inside a checkpoint") == 1


def test_a_leaf_that_outlives_its_graphs_keeps_no_hooks():
    manager = make_manager()
    x = torch.randn(1024, requires_grad=True)
    for _ in range(3):
        manager.begin_chunk()
        for backward in (True, False):
            y = in_group(manager, torch.exp, x)
            if backward:
                y.sum().backward()
            del y
        manager.reset()
        assert not x._backward_hooks


@pytest.mark.parametrize("stays", ["by plan", "soon", ""])
def test_a_forced_release_counts_where_the_group_that_asks_for_it_moves(monkeypatch, stays):
    # Where the inner group is kept, the outer one still copies what both have saved.
    manager = make_manager()
    if stays == "by plan":
        kept = {GroupKey(0, 1): "asked to"}
        monkeypatch.setattr(manager.learner, "reason_to_keep", lambda g: kept.get(g.key, ""))
    elif stays:
        monkeypatch.setattr(manager.decisions, "is_needed_soon", lambda g: g.name == "inner")
    manager.begin_chunk()
    x, y = torch.randn(1024, requires_grad=True), torch.randn(1024)
    expected = torch.autograd.grad((x * y * y).sum(), x)

    def outer(x):
        return in_group(manager, lambda x: x * y, x * y, "inner", [y])

    z = in_group(manager, outer, x, "outer")
    assert manager.transfers.stats.by_name["outer" if stays else "inner"].offloaded_bytes == 4096
    assert y.untyped_storage().nbytes() == (4096 if stays else 0)
    assert_same(expected, torch.autograd.grad(z.sum(), x))


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_forced_release_spares_what_another_tensor_reads(monkeypatch, is_marked):
    # As attention whose queries have a norm before it, and whose values are a part of its input.
    manager = make_manager(min_tensor_bytes=0)
    kept = {"norm": "asked to"}
    monkeypatch.setattr(manager.learner, "reason_to_keep", lambda g: kept.get(g.name, ""))
    x = torch.randn(64, 32, requires_grad=True)

    def attend(x, manager):
        both = x * 2

        def norm(both):
            return torch.nn.functional.layer_norm(both[:, :16], (16,))

        q = in_group(manager if is_marked else None, norm, both, "norm")
        v = both[:, 16:]
        return in_group(manager, lambda q: (q * v).exp(), q, "core", [q, v])

    expected = torch.autograd.grad(attend(x, None).sum(), x)
    manager.begin_chunk()
    y = attend(x, manager)
    manager.join_offloads()
    assert manager.transfers.stats.by_name["core"].offloaded_bytes > 0
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_limits_know_which_forward_is_alive_whatever_order_things_come_in():
    manager, weight = make_manager(), torch.nn.Parameter(torch.ones(64, 64))

    def forward(x):
        inner = x * 1  # which saves nothing
        return (inner @ weight).relu(), inner

    def run(*, delay=False):
        manager.begin_chunk()
        x = torch.ones(64, 64, requires_grad=True) * 1
        y, inner = in_group(manager, forward, x, delay=delay)
        return y.sum(), inner

    def saved_bytes():
        return manager.budget._saved_bytes

    run()[0].backward()
    manager.reset()
    late, other, one_bytes = run(delay=True), run(), saved_bytes()
    manager.flush_delayed_groups()  # while another's chunk is the current one
    assert saved_bytes() == 2 * one_bytes > 0
    del other
    third = run()
    assert saved_bytes() == 2 * one_bytes, "what has gone is forgotten, what was late isn't"
    (grad,) = torch.autograd.grad(*late)  # its group is reached, and not left
    fourth = run()
    assert saved_bytes() == 3 * one_bytes
    late[1].backward(grad)
    for loss, _ in (third, fourth):
        loss.backward()
    assert saved_bytes() == 0
