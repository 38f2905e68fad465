"""What a step teaches those after it about pinned memory, and what a trim frees."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from programs import (
    KIB,
    assert_same,
    check_steps,
    forward,
    make_manager,
    make_model,
    num_pending,
    one_forward_one_backward,
    run_step,
)

ORDER = one_forward_one_backward(8, depth=6)


def watch_pins(manager, monkeypatch):
    """Return what notes the calls that pin a slab, and those that may unpin some."""
    places = (manager.backend, "empty_host"), (manager.host_pool, "shrink")
    calls = [mock.Mock(wraps=getattr(*place)) for place in places]
    for place, noted in zip(places, calls, strict=True):
        monkeypatch.setattr(*place, noted)
    return calls


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
        calls = watch_pins(manager, monkeypatch)
        for _ in range(6):
            assert_same(expected[rows], run_step(model, manager, ORDER, rows=rows))
        assert not any(noted.called for noted in calls), "then the pool is left alone"
        settled.setdefault(rows, pool.stats.slab_bytes_total)
    assert settled[8] < 0.6 * settled[16]
    assert settled[16] < 0.6 * settled[32]


def test_what_is_pinned_remains_where_lengths_vary(monkeypatch):
    model, manager = make_model(), make_manager(host_slab_bytes=4 * KIB)
    draw = random.Random(0)
    for _ in range(4):
        run_step(model, manager, ORDER, rows=32)
    _, shrink = watch_pins(manager, monkeypatch)
    before = manager.host_pool.stats.slab_bytes_total
    for _ in range(40):
        run_step(model, manager, ORDER, rows=draw.randrange(8, 33))
    shrink.assert_not_called()
    assert manager.host_pool.stats.slab_bytes_total < 2 * before


def test_slabs_that_pieces_do_not_fill_are_pinned_once(monkeypatch):
    model = make_model()
    manager = make_manager(host_slab_bytes=8 * KIB)  # pieces don't fill one
    expected = run_step(model, None, ORDER, rows=24)
    for _ in range(2):  # the first had nothing to learn from, so it needed more
        assert_same(expected, run_step(model, manager, ORDER, rows=24))
    pin, _ = watch_pins(manager, monkeypatch)
    for _ in range(20):
        assert_same(expected, run_step(model, manager, ORDER, rows=24))
    pin.assert_not_called()


def test_a_trim_gives_everything_back_and_the_next_step_is_right(monkeypatch):
    model = make_model()
    manager = make_manager(host_slab_bytes=4 * KIB)
    trims = []
    monkeypatch.setattr(manager.backend, "trim_device", lambda: trims.append(1))
    assert manager.trim() == 0
    for _ in range(4):
        check_steps(model, manager, ORDER)
        pinned_bytes = manager.host_pool.stats.slab_bytes_total
        trims.clear()
        assert manager.trim() == pinned_bytes > 0
        assert trims
        assert manager.host_pool.stats.slab_bytes_total == 0


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
    loss = forward(model, manager)
    manager.flush_delayed_groups()
    del loss  # the graph goes with its copies still queued
    pinned_bytes = manager.host_pool.stats.slab_bytes_total
    assert num_pending(manager.backend) > 0
    assert manager.trim() == pinned_bytes > 0
    assert num_pending(manager.backend) == 0, "a copy into memory that is gone"
