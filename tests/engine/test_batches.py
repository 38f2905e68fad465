"""Small groups move as one: the same bits, the same counts, and fewer copies."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    check_steps,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.backends.base import Wait
from megatron_offload.core.group import GroupState
from megatron_offload.engine.observer import Observer

ORDER = one_forward_one_backward(6, depth=3)
ROOM = {"max_inflight_bytes": 48 * KIB, "prefetch_bytes": 64 * KIB}
"""Enough for batches of 14 KiB, which are two to five groups of the model."""


class Copies(Observer):
    """Counts launches and their copies."""

    def __init__(self):
        self.launches, self.pairs = Counter(), Counter()

    def copy_issued(self, direction, pairs, group):
        self.launches[direction] += 1
        self.pairs[direction] += len(pairs)


def add(manager, x, saved, name="g"):
    """Return ``x`` behind a group that saves a tensor."""
    return in_group(manager, lambda x: x * saved, x, name)


def nest(manager, shared, x):
    """Return what a group inside a group makes of a tensor that both save."""
    return add(manager, x * shared, shared, "inner")


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_has_fewer_copies_and_the_same_bits(timing, recomputes):
    model = make_model(layers=6, recomputes=recomputes)
    manager = make_manager(timing, **ROOM)
    copies = Copies()
    with manager.observed_by(copies):
        check_steps(model, manager, ORDER, 3)
    num_groups = manager.last_step.num_groups
    assert manager.last_step.offloaded_bytes > 0
    assert 0 < copies.launches["d2h"] <= 3 * num_groups // 2
    assert copies.pairs["d2h"] > 2 * copies.launches["d2h"]


def test_bytes_are_counted_for_the_group_that_has_them():
    model = make_model(layers=6)
    single, batched = make_manager(), make_manager(**ROOM)
    for manager in (single, batched):
        manager.begin_chunk()
        x = torch.randn(16, 32, requires_grad=True)
        for block in model:
            x = block(x, manager)
        manager.join_offloads()
        x.sum().backward()
        manager.reset()
    for name in ("norm", "mlp"):
        alone, both = (m.last_step.by_name[name] for m in (single, batched))
        assert alone.offloaded_bytes == both.offloaded_bytes > 0
        assert alone.reloaded_bytes == both.reloaded_bytes > 0
        assert alone.num_groups == both.num_groups
    away = batched.last_step.peak_away_bytes_by_name
    assert away == single.last_step.peak_away_bytes_by_name
    assert batched.last_profile == single.last_profile


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wait", [Wait.W1, Wait.W2, Wait.W4], ids=lambda wait: wait.name)
def test_a_missing_wait_of_a_batch_is_named(wait, timing):
    manager = make_manager(timing, removed_waits={wait}, **ROOM)
    for _ in range(3):
        run_step(make_model(layers=6), manager, ORDER)
    assert wait in {hazard.wait for hazard in manager.backend.hazards}


def test_what_two_groups_of_a_batch_share_is_copied_once():
    manager = make_manager(**ROOM)
    copies = Copies()
    shared, x = torch.randn(512), torch.randn(512, requires_grad=True)
    expected = torch.autograd.grad((x * shared * shared.clone() * shared).sum(), x)
    manager.begin_chunk()
    with manager.observed_by(copies):
        # The outer group has it first, and is committed last.
        z = in_group(manager, partial(nest, manager, shared), x, "outer")
        z = add(manager, z, shared)
        manager.flush_delayed_groups()
        assert copies.launches["d2h"] == 1
        assert copies.pairs["d2h"] == 1
        del shared
        manager.join_offloads()
        assert_same(expected, torch.autograd.grad(z.sum(), x))
        assert copies.pairs["h2d"] == 1
    manager.reset()
    del z
    assert_nothing_left(manager)


@pytest.mark.parametrize("leads", [False, True])
def test_what_was_emptied_before_its_batch_was_complete_stays(leads):
    # As selective recompute does: the storage is emptied, and filled again before backward.
    manager = make_manager(**ROOM)
    manager.begin_chunk()
    x, y, other = torch.randn(512, requires_grad=True), torch.randn(512), torch.randn(512)
    product = x * other * y if leads else x * y * other
    expected = torch.autograd.grad(product.sum(), x)
    z = add(manager, add(manager, x, other) if leads else x, y)
    values = y.clone()
    y.untyped_storage().resize_(0)
    z = z if leads else add(manager, z, other)
    manager.join_offloads()
    assert manager.transfers.stats.offloaded_bytes == other.nbytes
    y.untyped_storage().resize_(values.nbytes)
    y.untyped_storage().copy_(values.untyped_storage())
    assert_same(expected, torch.autograd.grad(z.sum(), x))


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_graph_that_goes_before_its_batch_is_complete_leaves_nothing(timing):
    model, manager = make_model(layers=6), make_manager(timing, **ROOM)
    for _ in range(2):
        manager.begin_chunk()
        x = torch.randn(16, 32, requires_grad=True)
        for block in model:
            x = block(x, manager)
        del x
        assert manager.host_pool.stats.in_use_bytes == 0
        check_steps(model, manager, ORDER)


def test_a_step_that_fails_leaves_no_batch_behind():
    model, manager = make_model(layers=6), make_manager(**ROOM)
    left = []

    def fail():
        with manager.step():
            manager.begin_chunk()
            left.append(add(manager, torch.randn(512, requires_grad=True), torch.randn(512)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    check_steps(model, manager, ORDER, 2)
    left.pop().sum().backward()  # what hadn't left is there


def test_a_part_of_the_graph_needs_only_a_part_of_a_batch():
    manager = make_manager(**ROOM)
    x, saved = torch.randn(512, requires_grad=True), [torch.randn(512) for _ in range(4)]
    manager.begin_chunk()
    z = [x]
    for one in saved:
        z.append(add(manager, z[-1], one))
    groups = list(manager.decisions.groups())
    manager.join_offloads()
    lead = groups[-1]
    assert [group.state for group in groups[:3]] == [GroupState.BATCHED] * 3
    assert [group.lead for group in groups] == [lead, lead, lead, None]
    assert (lead.state, lead.batch_bytes) == (GroupState.ON_HOST, 4 * 2 * KIB)
    first = torch.autograd.grad(z[2].sum(), x, retain_graph=True)
    assert_same([saved[1] * saved[0]], first)
    whole = torch.autograd.grad(z[4].sum(), x)
    assert_same([saved[3] * saved[2] * saved[1] * saved[0]], whole)
    manager.reset()
    del z, groups, lead
    assert_nothing_left(manager)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_what_was_made_on_another_stream_is_waited_for(monkeypatch, num_groups):
    # A batch may be complete only when a backward begins, which may be on a stream of its own.
    manager = make_manager(**ROOM)
    backend, recorded = manager.backend, []
    record, other = backend.record, backend.side_stream

    def record_at(stream):
        recorded.append(stream)
        return record(stream)

    monkeypatch.setattr(backend, "record", record_at)
    manager.begin_chunk()
    x = torch.randn(512, requires_grad=True)
    with backend.computing_on(other):
        for _ in range(num_groups):
            x = add(manager, x, torch.randn(512))
    assert other not in recorded
    manager.flush_delayed_groups()
    assert recorded.count(other) == 1
    manager.reset()
