"""What a step teaches those after it about memory: the search for a device memory target."""

from __future__ import annotations

import logging

import pytest
import torch
from programs import (
    KIB,
    assert_same,
    check_steps,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

ORDER = one_forward_one_backward(8, depth=6)
FIXED = 1024 * KIB


def make_measured(monkeypatch, *, waste=0, backward=0, **settings):
    """Return a manager whose device reserves what is fixed, what a step kept at most, and waste.

    From the first backward of a step on it needs ``backward`` bytes more.
    """
    manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None, **settings)
    reserved, trims = [FIXED], []
    passed = manager.window.pass_boundary

    def pass_boundary(num_bytes):
        passed(num_bytes)
        budget = manager.budget
        kept = budget.inflight_bytes + budget.held_bytes
        if manager.decisions.backward_order:
            kept += backward
        reserved[0] = max(reserved[0], FIXED + kept + waste)

    def trim_device():
        trims.append(reserved[0])
        reserved[0] = FIXED

    monkeypatch.setattr(manager.window, "pass_boundary", pass_boundary)
    monkeypatch.setattr(manager.backend, "trim_device", trim_device)
    monkeypatch.setattr(manager.backend, "reserved_bytes", lambda: reserved[0])
    return manager, reserved, trims


def make_settled(monkeypatch, model):
    """Return the same after the search for ``FIXED + 64 * KIB`` is over."""
    manager, reserved, trims = make_measured(monkeypatch, device_target_bytes=FIXED + 64 * KIB)
    for _ in range(16):
        run_step(model, manager, ORDER)
    return manager, reserved, trims


@pytest.mark.sampled
@pytest.mark.parametrize("room", [40 * KIB, 64 * KIB, 96 * KIB])
@pytest.mark.parametrize("waste", [0, 7 * KIB])
@pytest.mark.parametrize("backward", [0, 11 * KIB])
def test_steps_come_to_the_target_and_stay_there(room, waste, backward, monkeypatch):
    model = make_model()
    target = FIXED + room
    manager, reserved, trims = make_measured(
        monkeypatch, waste=waste, backward=backward, device_target_bytes=target
    )
    check_steps(model, manager, ORDER, 20)
    num_trims = len(trims)
    moved = manager.last_step.offloaded_bytes
    check_steps(model, manager, ORDER, 3)
    assert len(trims) == num_trims, "once it is there nothing is trimmed any more"
    largest = max(group.num_bytes for group in manager.last_profile.groups)
    assert target - 2 * largest - target // 32 <= reserved[0] <= target
    assert manager.last_step.offloaded_bytes == moved > 0


@pytest.mark.slow
def test_a_warm_up_takes_what_no_backward_needs_yet(monkeypatch):
    model = make_model()
    kept = {}
    for backward in (0, 24 * KIB):
        manager, reserved, _ = make_measured(
            monkeypatch, backward=backward, device_target_bytes=FIXED + 80 * KIB
        )
        check_steps(model, manager, ORDER, 20)
        assert reserved[0] <= FIXED + 80 * KIB
        at_commits, commit = [], manager.commit

        def watched(group, *args, commit=commit, manager=manager, seen=at_commits, **kw):
            commit(group, *args, **kw)
            if not manager.decisions.backward_order:
                budget = manager.budget
                seen.append(budget.inflight_bytes + budget.held_bytes)

        monkeypatch.setattr(manager, "commit", watched)
        run_step(model, manager, ORDER)
        kept[backward] = max(at_commits) - manager.budget.total_bytes
        assert manager.budget.warmup_extra_bytes >= kept[backward]
    assert kept[0] <= 0, "without need of its own a backward leaves nothing"
    assert 12 * KIB <= kept[24 * KIB] <= 24 * KIB


def test_a_step_that_misses_the_target_later_makes_room(monkeypatch):
    model = make_model()
    manager, reserved, trims = make_settled(monkeypatch, model)
    total, num_trims = manager.budget.total_bytes, len(trims)
    passed = manager.window.pass_boundary

    def fragmented(num_bytes):
        passed(num_bytes)
        reserved[0] += KIB // 4

    monkeypatch.setattr(manager.window, "pass_boundary", fragmented)
    for _ in range(12):
        run_step(model, manager, ORDER)
    assert num_trims < len(trims) <= num_trims + 12
    assert manager.budget.total_bytes < total
    assert reserved[0] <= FIXED + 64 * KIB


def test_what_others_reserve_between_steps_costs_no_budget(monkeypatch):
    model = make_model()
    manager, reserved, trims = make_settled(monkeypatch, model)
    total, num_trims = manager.budget.total_bytes, len(trims)
    for _ in range(3):
        reserved[0] = FIXED + 900 * KIB  # an evaluation with long sequences
        run_step(model, manager, ORDER)
        run_step(model, manager, ORDER)
        assert reserved[0] <= FIXED + 64 * KIB, "handed back"
    assert (manager.budget.total_bytes, len(trims)) == (total, num_trims + 3)


def test_a_target_that_can_not_be_met_is_said_once(monkeypatch, caplog):
    model = make_model()
    manager, _, _ = make_measured(monkeypatch, device_target_bytes=FIXED // 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(14):
            run_step(model, manager, ORDER)
    assert [r.message.split()[0] for r in caplog.records].count("device_target_bytes") == 1
    largest = max(group.num_bytes for group in manager.last_profile.groups)
    assert manager.budget.total_bytes == 2 * largest


def test_with_room_for_all_nothing_moves(monkeypatch):
    model = make_model()
    manager, _, _ = make_measured(monkeypatch, device_target_bytes=FIXED + 400 * KIB)
    for _ in range(12):
        run_step(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes == 0


def test_where_the_device_can_not_tell_nothing_is_searched(monkeypatch):
    model = make_model()
    settings = {"max_inflight_bytes": 16 * KIB, "prefetch_bytes": None}
    managers = make_manager(**settings), make_manager(**settings, device_target_bytes=1024)
    for manager in managers:
        for _ in range(6):
            run_step(model, manager, ORDER)
    assert managers[0].budget.total_bytes == managers[1].budget.total_bytes > 16 * KIB


def test_pinned_memory_comes_down_to_what_a_learned_step_uses(monkeypatch):
    model = make_model()
    manager = make_manager(
        host_slab_bytes=4 * KIB, max_inflight_bytes=8 * KIB, prefetch_bytes=8 * KIB
    )
    kept, shrink = [], manager.host_pool.shrink

    def watched(keep_bytes):
        kept.append(keep_bytes)
        return shrink(keep_bytes)

    monkeypatch.setattr(manager.host_pool, "shrink", watched)
    used = []
    for _ in range(20):
        run_step(model, manager, ORDER)
        used.append(manager.last_step.peak_host_bytes)
    assert used[0] > used[1] > used[-1], "each of the first steps teaches something"
    assert used[-1] <= kept[-1] <= 1.1 * used[-1], "small tensors are rounded up"
    assert len(kept) <= 3, "and then the pool is left alone"
    assert manager.host_pool.stats.slab_bytes_total <= 1.1 * used[-1]
    assert manager.host_pool.stats.peak_slab_bytes >= used[0]


def watch_pins(manager, monkeypatch):
    """Return two lists that fill with the sizes of slabs pinned, and of what was unpinned."""
    pinned, unpinned = [], []
    empty_host, shrink = manager.backend.empty_host, manager.host_pool.shrink

    def watched_empty_host(num_bytes):
        pinned.append(num_bytes)
        return empty_host(num_bytes)

    def watched_shrink(keep_bytes=0):
        unpinned.append(shrink(keep_bytes))
        return unpinned[-1]

    monkeypatch.setattr(manager.backend, "empty_host", watched_empty_host)
    monkeypatch.setattr(manager.host_pool, "shrink", watched_shrink)
    return pinned, unpinned


@pytest.mark.sampled
@pytest.mark.parametrize("timing", ["eager", "late", "random"])
def test_pinned_memory_follows_when_shapes_change_for_good(monkeypatch, timing):
    model = make_model()
    manager = make_manager(timing, host_slab_bytes=4 * KIB)
    pool = manager.host_pool
    expected = {rows: run_step(model, None, ORDER, rows=rows) for rows in (16, 8, 32)}
    settled = {}
    for rows in (16, 8, 32):
        for _ in range(18):
            assert_same(expected[rows], run_step(model, manager, ORDER, rows=rows))
        used = manager.last_step.peak_host_bytes
        assert used <= pool.stats.slab_bytes_total <= 1.15 * used + 4 * KIB
        pinned, unpinned = watch_pins(manager, monkeypatch)
        for _ in range(6):
            assert_same(expected[rows], run_step(model, manager, ORDER, rows=rows))
        assert (pinned, unpinned) == ([], []), "then the pool is left alone"
        settled.setdefault(rows, pool.stats.slab_bytes_total)
    assert settled[8] < 0.6 * settled[16]
    assert settled[16] < 0.6 * settled[32]


def test_a_trim_gives_everything_back_and_the_next_step_is_right(monkeypatch):
    model = make_model()
    manager = make_manager(host_slab_bytes=4 * KIB, retained_device_bytes=1024 * KIB)
    trims = []
    monkeypatch.setattr(manager.backend, "trim_device", lambda: trims.append(1))
    assert manager.trim() == 0
    for _ in range(4):
        check_steps(model, manager, ORDER)
        pinned_bytes = manager.host_pool.stats.slab_bytes_total
        assert manager.tensor_pool.retained_bytes > 0
        trims.clear()
        assert manager.trim() == pinned_bytes > 0
        assert trims
        assert manager.host_pool.stats.slab_bytes_total == 0
        assert manager.tensor_pool.retained_bytes == 0


@pytest.mark.parametrize("timing", ["eager", "late", "random"])
def test_a_trim_leaves_what_a_live_graph_needs(timing):
    model = make_model()
    manager = make_manager(timing, host_slab_bytes=4 * KIB)
    commit, leave, trims = manager.commit, manager.leave_backward, []

    def commit_and_trim(*args, **options):
        commit(*args, **options)
        trims.append(manager.trim())

    def leave_and_trim(*args):
        leave(*args)
        trims.append(manager.trim())

    manager.commit, manager.leave_backward = commit_and_trim, leave_and_trim
    check_steps(model, manager, ORDER, 3)
    assert sum(trims) > 0


def test_a_trim_waits_for_copies_that_nothing_has_waited_for():
    model = make_model()
    manager = make_manager("late", host_slab_bytes=4 * KIB, max_inflight_bytes=1024 * KIB)
    manager.begin_chunk()
    x = torch.randn(16, 32, requires_grad=True)
    for block in model:
        x = block(x, manager)
    del x  # the graph goes with its copies still queued
    pinned_bytes = manager.host_pool.stats.slab_bytes_total
    assert manager.backend.num_pending > 0
    assert manager.trim() == pinned_bytes > 0
    assert manager.backend.num_pending == 0, "a copy into memory that is gone"
