"""What a step teaches those after it about memory: the search for a device memory target."""

from __future__ import annotations

import logging

import pytest
from programs import KIB, assert_same, make_manager, make_model, one_forward_one_backward, run_step

ORDER = one_forward_one_backward(8, depth=6)
FIXED = 1024 * KIB


def make_measured(monkeypatch, *, waste=0, **settings):
    """Return a manager whose device reserves what is fixed, what a step kept at most, and waste."""
    manager = make_manager(**settings)
    reserved, trims = [FIXED], []
    passed = manager.transfers.pass_boundary

    def pass_boundary(num_bytes):
        passed(num_bytes)
        budget = manager.budget
        kept = budget.inflight_bytes + budget.held_bytes + budget.resident_bytes
        reserved[0] = max(reserved[0], FIXED + kept + waste)

    def trim_device():
        trims.append(reserved[0])
        reserved[0] = FIXED

    monkeypatch.setattr(manager.transfers, "pass_boundary", pass_boundary)
    monkeypatch.setattr(manager.backend, "trim_device", trim_device)
    monkeypatch.setattr(manager.backend, "reserved_bytes", lambda: reserved[0])
    return manager, reserved, trims


@pytest.mark.parametrize("room", [32 * KIB, 64 * KIB, 96 * KIB])
@pytest.mark.parametrize("waste", [0, 7 * KIB])
def test_steps_come_to_the_target_and_stay_there(room, waste, monkeypatch):
    model = make_model()
    expected = run_step(model, None, ORDER)
    target = FIXED + room
    manager, reserved, trims = make_measured(
        monkeypatch,
        waste=waste,
        max_inflight_bytes=16 * KIB,
        prefetch_bytes=16 * KIB,
        device_target_bytes=target,
    )
    for _ in range(16):
        assert_same(expected, run_step(model, manager, ORDER))
    num_trims = len(trims)
    moved = manager.last_step.offloaded_bytes
    for _ in range(3):
        assert_same(expected, run_step(model, manager, ORDER))
    assert len(trims) == num_trims, "once it is there nothing is trimmed any more"
    largest = max(group.num_bytes for group in manager.last_profile.groups)
    assert target - 2 * largest - target // 32 <= reserved[0] <= target
    assert manager.last_step.offloaded_bytes == moved > 0


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
    manager = make_manager(max_inflight_bytes=16 * KIB, device_target_bytes=1)
    for _ in range(6):
        run_step(model, manager, ORDER)
    assert manager.budget.total_bytes == 16 * KIB
