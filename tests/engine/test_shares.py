"""What is offloaded of a share leaves the device in good time, however small the share is."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from programs import (
    KIB,
    assert_same,
    check_steps,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload import OffloadActivations
from megatron_offload.engine.observer import Observer
from megatron_offload.observe.live_bytes import LiveActivationMeter

GROUP_BYTES = 16 * KIB
NUM_GROUPS = 16
DEFAULTS = {"max_inflight_bytes": None, "prefetch_bytes": None}


def off_the_device(manager):
    blocks = (block for group in manager.decisions.groups() for block in group.blocks())
    return sum(block.num_bytes for block in blocks if block.released)


def train(manager, sizes=(GROUP_BYTES,) * NUM_GROUPS):
    """Take a step of one group for each size; return results, bytes off at the end, and the peak.

    Without a manager it is the same step with no offload.
    """
    meter = LiveActivationMeter()
    x = torch.full((8,), 0.01, requires_grad=True)
    y = x
    with meter, manager.observed_by(meter) if manager else nullcontext():
        if manager:
            manager.begin_chunk()
        for size in sizes:  # each saves its result alone
            y = in_group(manager, lambda y, size=size: y.mean().expand(size // 4).exp(), y)
        loss = y.sum()
        off_bytes = off_the_device(manager) if manager else 0
        loss.backward()
    if manager:
        manager.reset()
    return [loss.detach().clone(), x.grad], off_bytes, meter.peak_bytes


def assert_frees_memory(manager, sizes=(GROUP_BYTES,) * NUM_GROUPS, *, num_steps=3):
    """Every step from here on has its bytes away at the end of forward, and its peak is lower."""
    expected, _, peak_without = train(None, sizes)
    for _ in range(num_steps):
        results, off_bytes, peak_bytes = train(manager, sizes)
        assert_same(expected, results)
        copied = manager.last_step.offloaded_bytes
        assert copied > 0
        assert off_bytes >= 0.7 * copied
        assert peak_bytes <= peak_without - off_bytes + max(sizes)
        by_name = manager.last_step.peak_released_bytes_by_name
        assert manager.last_step.peak_released_bytes == sum(by_name.values()) == off_bytes


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("is_ratio", [False, True])
def test_a_share_of_the_groups_or_bytes_frees_memory(share, is_ratio):
    asked = {"policy": {"kind": "ratio", "ratio": share}} if is_ratio else {"fraction": share}
    manager = make_manager(**asked, **DEFAULTS)
    train(manager)
    assert_frees_memory(manager)


def test_a_ratio_moves_that_share_of_the_bytes_after_a_failed_step_too():
    model, order = make_model(), one_forward_one_backward(4, depth=3)
    manager = make_manager(policy={"kind": "ratio", "ratio": 0.3})
    run_step(model, manager, order)
    for _ in range(2):
        check_steps(model, manager, order)
        sizes = [group.num_bytes for group in manager.learner.profile.groups]
        missing = 0.3 * sum(sizes) - manager.last_step.offloaded_bytes
        assert 0 <= missing < max(sizes)
        kept = manager.learner.kept
        manager.begin_chunk()
        manager.guard.fail()  # as an error in the middle of a call does
        manager.abort()
        assert manager.learner.kept == kept


def test_a_share_that_the_program_changes_counts_from_the_next_step_on():
    manager = make_manager(**DEFAULTS)
    begin, moved = manager.begin_chunk, []
    for fraction in (0.25, 0.5, 0.25):
        manager.begin_chunk = partial(begin, fraction=fraction)
        for _ in range(2):
            train(manager)
        moved.append(manager.last_step.offloaded_bytes)
    assert moved[0] == moved[2] < 0.6 * moved[1]


def test_of_a_step_that_moves_nothing_only_an_observer_sees_groups():
    model, order = make_model(layers=3), one_forward_one_backward(2, depth=1)
    manager = make_manager(fraction=0.0)
    context = OffloadActivations(manager=manager, min_offload_size=0)
    for observers, num_groups in (((), 0), ((Observer(),), 3 * 2 * 2), ((), 0)):
        with manager.observed_by(*observers):
            check_steps(model, manager, order)
            assert manager.last_step.num_groups == num_groups
            with context:
                y = torch.ones(64, requires_grad=True).exp()
            assert len(manager.decisions.groups()) == len(observers)
            del y
            manager.reset()


def test_a_large_group_that_is_kept_makes_no_room_for_copies():
    sizes = (GROUP_BYTES,) * NUM_GROUPS + (8 * GROUP_BYTES,)
    manager = make_manager(fraction=0.5, **DEFAULTS)
    train(manager, sizes)
    assert manager.last_step.offloaded_bytes == sum(sizes), "nothing is known in the first step"
    assert_frees_memory(manager, sizes)


@pytest.mark.parametrize("limit", ["max_inflight_bytes", "both"])
def test_room_that_was_set_is_used_until_the_first_backward(limit):
    room = {**DEFAULTS, "max_inflight_bytes": 4 * GROUP_BYTES}
    if limit == "both":
        room["prefetch_bytes"] = 0
    manager = make_manager(fraction=0.25, **room)
    for _ in range(3):
        _, off_bytes, _ = train(manager)
    assert manager.last_step.offloaded_bytes == 4 * GROUP_BYTES
    assert off_bytes == 0
