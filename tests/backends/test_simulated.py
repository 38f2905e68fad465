"""Each of the six waits is left out in turn, under every copy timing.

Where the host's time counts, compute takes that between two calls, copies that of their bytes, and
calls take none.
"""

from unittest import mock

import pytest
import torch
from programs import Forgetful, num_pending

from megatron_offload.backends.base import Wait
from megatron_offload.config import SimulatedConfig
from megatron_offload.errors import HazardError

TIMINGS = ("eager", "late", "eager_d2h_late_h2d", "late_d2h_eager_h2d", "random")
POISON = 0xFF
NUM_BYTES = 1024


def make(timing="late", *, on_hazard="collect", without=(), **config):
    settings = SimulatedConfig(copy_timing=timing, **config)
    return Forgetful(settings, removed_waits=without, raises=on_hazard == "raise")


def filled(value, num_bytes=NUM_BYTES):
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def empty_device(backend, num_bytes=NUM_BYTES):
    return backend.empty_device_like(torch.empty(num_bytes, dtype=torch.uint8))


def offload(backend, source, host, label="x"):
    """Produce, W1, copy; return the event behind the copy."""
    backend.note_produced(source, label)
    backend.wait_compute(backend.d2h_stream, Wait.W1)
    return backend.copy([(host, source)], backend.d2h_stream, label)


def reload(backend, host, target, d2h_done, label="x"):
    """W6, W3, copy; return the event behind the copy."""
    backend.wait_compute(backend.h2d_stream, Wait.W6)
    backend.wait(backend.h2d_stream, d2h_done, Wait.W3)
    return backend.copy([(target, host)], backend.h2d_stream, label)


def offload_and_reload(backend, host):
    """Return what is reloaded of a tensor of sevens, and the events behind the copies."""
    target = empty_device(backend)
    d2h_done = offload(backend, filled(7), host)
    return target, d2h_done, reload(backend, host, target, d2h_done)


# One short program for each wait, in which no other wait orders the same two accesses. Each returns
# the tensor whose value depends on the wait, and what it should be, or None where a program that
# is its own compute stream can't go wrong.


def source_is_copied(backend):
    offload(backend, filled(7), backend.empty_host(NUM_BYTES))


def source_is_released(backend):
    source, host = filled(7), backend.empty_host(NUM_BYTES)
    d2h_done = offload(backend, source, host)
    backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
    backend.note_freed(source, "x", sole_owner=True)
    backend.sync_copies()
    return host, 7


def host_buffer_is_read(backend):
    target, *_ = offload_and_reload(backend, backend.empty_host(NUM_BYTES))
    backend.sync_copies()
    return target, 7


def reloaded_tensor_is_used(backend):
    target, _, h2d_done = offload_and_reload(backend, backend.empty_host(NUM_BYTES))
    backend.wait(backend.compute_stream(), h2d_done, Wait.W4)
    backend.note_consumed(target, "x")
    return target.clone(), 7


def host_buffer_is_reused(backend):
    host = backend.empty_host(NUM_BYTES)
    target, _, h2d_done = offload_and_reload(backend, host)
    backend.wait(backend.d2h_stream, h2d_done, Wait.W5)
    offload(backend, filled(8), host, "y")
    backend.sync_copies()
    return target, 7


def target_is_reused(backend):
    first, second = backend.empty_host(NUM_BYTES), backend.empty_host(NUM_BYTES)
    target, _, h2d_done = offload_and_reload(backend, first)
    backend.wait(backend.compute_stream(), h2d_done, Wait.W4)
    d2h_done = offload(backend, filled(8), second, "y")
    backend.note_consumed(target, "x")
    reload(backend, second, target, d2h_done, "y")


PROGRAMS = {
    Wait.W1: source_is_copied,
    Wait.W2: source_is_released,
    Wait.W3: host_buffer_is_read,
    Wait.W4: reloaded_tensor_is_used,
    Wait.W5: host_buffer_is_reused,
    Wait.W6: target_is_reused,
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wait", Wait)
def test_nothing_is_reported_and_values_are_right_with_all_waits(wait, timing):
    backend = make(timing, on_hazard="raise")
    outcome = PROGRAMS[wait](backend)
    assert backend.hazards == []
    if outcome is not None:
        tensor, value = outcome
        assert torch.equal(tensor, filled(value))


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wait", Wait)
def test_a_missing_wait_is_named_in_every_timing(wait, timing):
    backend = make(timing, without=[wait])
    PROGRAMS[wait](backend)
    assert {hazard.wait for hazard in backend.hazards} == {wait}


def test_the_error_text_names_labels_and_order_numbers():
    backend = make(on_hazard="raise", without=[Wait.W3])
    host, target = backend.empty_host(NUM_BYTES), empty_device(backend)
    d2h_done = offload(backend, filled(7), host, "layer 3")
    with pytest.raises(HazardError) as caught:
        reload(backend, host, target, d2h_done, "layer 3 again")
    assert str(caught.value) == (
        "W3 is missing: H2D reads the host buffer before D2H has finished: "
        "h2d read [layer 3 again] (#6) is not ordered after d2h write [layer 3] (#4)"
    )


# What counts as ordered.


def test_order_is_transitive_through_the_compute_stream():
    backend = make(on_hazard="raise", without=[Wait.W3])
    source, host = filled(7), backend.empty_host(NUM_BYTES)
    d2h_done = offload(backend, source, host)
    backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
    reload(backend, host, empty_device(backend), d2h_done)  # W6 leads there


def test_an_event_recorded_too_early_orders_nothing():
    backend = make()
    too_early = backend.record(backend.compute_stream())
    source = filled(7)
    backend.note_produced(source, "x")
    backend.wait(backend.d2h_stream, too_early, Wait.W1)
    backend.copy([(backend.empty_host(NUM_BYTES), source)], backend.d2h_stream, "x")
    assert [hazard.wait for hazard in backend.hazards] == [Wait.W1]


def test_a_host_sync_orders_all_that_is_queued_afterwards():
    backend = make(on_hazard="raise", without=[Wait.W2, Wait.W3])
    source, host = filled(7), backend.empty_host(NUM_BYTES)
    d2h_done = offload(backend, source, host)
    backend.sync_copies()
    backend.note_freed(source, "x", sole_owner=True)
    reload(backend, host, empty_device(backend), d2h_done)


def test_an_event_found_done_orders_all_that_is_queued_afterwards():
    backend = make("eager", on_hazard="raise", without=[Wait.W2])
    source = filled(7)
    d2h_done = offload(backend, source, backend.empty_host(NUM_BYTES))
    assert backend.is_done(d2h_done)
    backend.note_freed(source, "x", sole_owner=True)


def test_a_view_inside_a_larger_region_counts_against_its_bytes_only():
    backend = make(without=[Wait.W4])
    host, target = backend.empty_host(NUM_BYTES), empty_device(backend)
    d2h_done = offload(backend, filled(7), host)
    half = NUM_BYTES // 2
    reload(backend, host[:half], target[:half], d2h_done)
    backend.note_consumed(target[half:], "untouched half")
    assert backend.hazards == []
    backend.note_consumed(target[half - 1 : half + 1], "both halves")
    assert [hazard.wait for hazard in backend.hazards] == [Wait.W4]


def test_a_hazard_is_found_after_the_memory_was_split_up_anew():
    backend = make(without=[Wait.W5])
    slab = backend.empty_host(4 * NUM_BYTES)
    for piece in slab.split(NUM_BYTES):
        offload(backend, filled(7), piece)
    d2h_done = backend.record(backend.d2h_stream)
    last = slab[3 * NUM_BYTES :]
    reload(backend, last, empty_device(backend), d2h_done, "small")
    offload(backend, filled(1, 2 * NUM_BYTES), slab[: 2 * NUM_BYTES])
    assert backend.hazards == []
    offload(backend, filled(8, 2 * NUM_BYTES), slab[2 * NUM_BYTES :], "large")
    (hazard,) = backend.hazards
    assert (hazard.wait, hazard.earlier.label, hazard.later.label) == (Wait.W5, "small", "large")


def test_saving_the_same_bytes_twice_is_no_hazard_but_keeps_the_copy_under_way_on_record():
    backend = make()
    source = filled(7)
    offload(backend, source, backend.empty_host(NUM_BYTES), "first")
    second_done = offload(backend, source, backend.empty_host(NUM_BYTES), "second")
    assert backend.hazards == []
    backend.note_freed(source, "x", sole_owner=False)
    assert [hazard.wait for hazard in backend.hazards] == [Wait.W2]
    assert backend.hazards[0].earlier.label == "second"
    backend.wait(backend.compute_stream(), second_done, Wait.W2)
    backend.note_freed(source, "x", sole_owner=False)
    assert len(backend.hazards) == 1


def test_memory_at_a_reused_address_starts_a_history_of_its_own():
    backend = make(on_hazard="raise")
    memory = filled(7, 4 * NUM_BYTES)  # stands for addresses that the allocator hands out anew
    host = backend.empty_host(4 * NUM_BYTES)
    for start, end in ((0, 4), (1, 3), (0, 2), (2, 4), (0, 1)):
        region = memory[start * NUM_BYTES : end * NUM_BYTES]
        d2h_done = offload(backend, region, host[: region.nbytes])
        backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
        backend.note_freed(region, "x", sole_owner=True)


# When copies happen.


def test_a_late_queue_runs_up_to_the_event_and_no_further():
    backend = make("late")
    first, second = backend.empty_host(NUM_BYTES), backend.empty_host(NUM_BYTES)
    d2h_done = offload(backend, filled(7), first)
    offload(backend, filled(8), second)
    backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
    assert torch.equal(first, filled(7))
    assert torch.equal(second, filled(POISON))
    backend.sync_copies()
    assert torch.equal(second, filled(8))
    assert num_pending(backend) == 0


@pytest.mark.parametrize(
    ("timing", "d2h_at_once", "h2d_at_once"),
    [("eager_d2h_late_h2d", True, False), ("late_d2h_eager_h2d", False, True)],
)
def test_each_direction_has_its_own_timing(timing, d2h_at_once, h2d_at_once):
    backend = make(timing, without=[Wait.W3])
    _, d2h_done, h2d_done = offload_and_reload(backend, backend.empty_host(NUM_BYTES))
    assert (backend.is_done(d2h_done), backend.is_done(h2d_done)) == (d2h_at_once, h2d_at_once)


def test_long_queues_that_wait_for_each_other_run_in_their_order():
    backend = make("late", check_hazards=False, poison=False)
    host, target = backend.empty_host(8), empty_device(backend, 8)
    source = filled(7, 8)
    for _ in range(5000):
        backend.copy([(host, source)], backend.d2h_stream, "out")
        backend.wait(backend.h2d_stream, backend.record(backend.d2h_stream), Wait.W3)
        backend.copy([(target, host)], backend.h2d_stream, "in")
        backend.wait(backend.d2h_stream, backend.record(backend.h2d_stream), Wait.W5)
    assert num_pending(backend) == 10_000
    backend.sync_copies()
    assert num_pending(backend) == 0
    assert torch.equal(target, filled(7, 8))


def progress(seed):
    """Return how many copies are left after each of many calls."""
    backend = make("random", seed=seed)
    host = [backend.empty_host(64) for _ in range(20)]
    seen = []
    for number, buffer in enumerate(host):
        d2h_done = offload(backend, filled(number, 64), buffer)
        reload(backend, buffer, empty_device(backend, 64), d2h_done)
        seen.append(num_pending(backend))
    return seen


def test_random_timing_is_reproducible_by_its_seed_and_late_now_and_then():
    assert progress(3) == progress(3)
    finals = [progress(seed)[-1] for seed in range(16)]
    assert 0 == min(finals) < max(finals)


# Memory.


@pytest.mark.parametrize("poison", [True, False])
def test_fresh_memory_is_poisoned_and_so_is_what_is_freed_if_nobody_else_holds_it(poison):
    backend = make(poison=poison)
    region, shared = filled(7), filled(7)
    backend.note_freed(region, "x", sole_owner=True)
    backend.note_freed(shared, "y", sole_owner=False)
    assert torch.equal(region, filled(POISON if poison else 7))
    assert torch.equal(shared, filled(7))
    if poison:
        assert torch.equal(backend.empty_host(NUM_BYTES), filled(POISON))
        assert torch.equal(empty_device(backend), filled(POISON))


def test_what_an_interrupt_has_kept_from_being_freed_is_freed_again(monkeypatch):
    backend = make(on_hazard="raise")
    target, side = empty_device(backend), backend.side_stream
    side.wait_event(backend.compute_stream().record_event())
    with backend.computing_on(side):
        backend.read_on(side, target)
        backend.note_consumed(target, "x")
    record = mock.Mock(side_effect=[KeyboardInterrupt, side.record_event()])
    monkeypatch.setattr(backend, "record", record)
    with pytest.raises(KeyboardInterrupt):
        backend.note_freed(target, "x", sole_owner=True)
    for _ in range(2):
        backend.note_freed(target, "x", sole_owner=True)
    assert record.call_count == 2, "once it is free nothing is waited for"


def test_the_checks_are_small_over_many_steps():
    backend = make("eager", on_hazard="raise")
    slab, source = backend.empty_host(64 * NUM_BYTES), filled(7, 64 * NUM_BYTES)
    ready = None
    for step in range(50):
        size = (step % 7 + 1) * NUM_BYTES
        if ready is not None:
            backend.wait(backend.d2h_stream, ready, Wait.W5)
        for start in range(0, slab.nbytes - size, size):
            region, buffer = source[start : start + size], slab[start : start + size]
            d2h_done = offload(backend, region, buffer)
            backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
            backend.note_freed(region, "x", sole_owner=False)
            ready = reload(backend, buffer, region, d2h_done)
            backend.wait(backend.compute_stream(), ready, Wait.W4)
    assert len(backend._host._intervals) < 200
    assert len(backend._device._intervals) < 400
