"""A recorded step on a real device, against events and counters that are placed by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_cuda import MIB, make_inputs, make_manager, make_model, run_step

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.observe.recorder import profile_step
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.planning.files import load_profile, save_profile
from megatron_offload.planning.profiled_job import measured_peak_bytes

pytestmark = pytest.mark.gpu


def now():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ByHand(torch.nn.Module):
    """A layer with events of its own around its group, and the bytes allocated at its start.

    The group leaves out the sum with the residual, which takes far less than the tolerance.
    """

    def __init__(self, layer, seen):
        super().__init__()
        self.norm, self.layer, self.seen = layer.norm, layer, seen

    def forward(self, x, manager):
        seen = {"start_bytes": torch.cuda.memory_allocated(), "start": now()}
        y = self.layer(x, manager)
        seen |= {"commit": now()}
        y.register_hook(lambda grad: seen.update(backward=now()))
        x.register_hook(lambda grad: seen.update(done=now()))
        self.seen.append(seen)
        return y


def test_times_and_bytes_are_those_that_are_taken_by_hand():
    model = make_model(layers=4, width=2048)
    inputs = make_inputs(model, num_microbatches=6, rows=8192)
    manager = make_manager()
    for _ in range(3):
        run_step(model, manager, inputs)
    seen = []
    watched = torch.nn.ModuleList(ByHand(layer, seen) for layer in model)
    run_step(watched, manager, inputs)
    seen.clear()
    torch.cuda.synchronize()
    with profile_step(manager, moves=False) as recorded:
        began = now()
        run_step(watched, manager, inputs)
        ended = now()
    torch.cuda.synchronize()
    profile = recorded.profile
    assert profile.offloaded_bytes == 0
    assert len(seen) == len(profile.times) == 24
    times = {group.key: each for group, each in zip(profile.groups, profile.times, strict=True)}
    for index, by_hand in enumerate(seen):
        each = times[GroupKey(index // 4, index % 4)]
        forward_us = 1e3 * by_hand["start"].elapsed_time(by_hand["commit"])
        backward_us = 1e3 * by_hand["backward"].elapsed_time(by_hand["done"])
        assert each.committed_us - each.started_us == pytest.approx(forward_us, rel=0.05, abs=20)
        assert each.done_us - each.backward_us == pytest.approx(backward_us, rel=0.05, abs=20)
    assert profile.step_us == pytest.approx(1e3 * began.elapsed_time(ended), rel=0.05)
    assert profile.peak_allocated_bytes >= max(one["start_bytes"] for one in seen)
    manager.close()


def test_a_resident_step_shows_what_groups_save_and_the_device_really_has():
    model = make_model(layers=4, width=2048)
    inputs = make_inputs(model, rows=8192)
    manager = make_manager()
    for _ in range(5):
        run_step(model, manager, inputs)
    stats = manager.last_step
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with profile_step(manager, moves=False) as recorded:
        results = run_step(model, manager, inputs)
    profile = recorded.profile
    assert all(group.num_bytes > 0 for group in profile.groups)
    peak_bytes = measured_peak_bytes(profile)
    assert profile.peak_allocated_bytes <= torch.cuda.max_memory_allocated()
    assert peak_bytes <= torch.cuda.max_memory_reserved()
    reference = run_step(model, None, inputs)
    assert_same(reference, results)
    saved = Counter()
    for group in profile.groups:
        saved[group.key.chunk] += group.num_bytes
    assert 0 < max(saved.values()) < peak_bytes
    del results, reference
    for _ in range(2):
        run_step(model, manager, inputs)
    assert manager.last_step.offloaded_bytes == stats.offloaded_bytes > 0
    assert_nothing_left(manager)
    manager.close()


def test_memory_is_reported_as_if_nothing_had_moved():
    model = make_model(layers=4, width=2048)
    inputs = make_inputs(model, rows=8192)
    manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None)
    for _ in range(4):
        run_step(model, manager, inputs)
    found = {}
    for moves in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with profile_step(manager, moves=moves) as recorded:
            results = run_step(model, manager, inputs)
        found[moves] = recorded.profile
        del results
        run_step(model, manager, inputs)
    # What lives between two boundaries alone, as the loss's does, is seen where nothing is
    # offloaded.
    peaks = {moves: measured_peak_bytes(profile) for moves, profile in found.items()}
    allocated = {moves: profile.peak_allocated_bytes for moves, profile in found.items()}
    assert found[True].offloaded_bytes > peaks[False] / 4
    assert found[True].groups == found[False].groups
    assert allocated[True] == pytest.approx(allocated[False], rel=0.01)
    assert 0.92 * peaks[False] <= peaks[True] <= 1.01 * peaks[False]
    manager.close()


@pytest.mark.parametrize("moves", [True, False])
def test_the_host_never_waits_inside(moves, tmp_path):
    model = make_model()
    inputs = make_inputs(model)
    manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None)
    for _ in range(4):
        run_step(model, manager, inputs)
    torch.cuda.synchronize()
    with profile_step(manager, moves=moves) as recorded:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_step(model, manager, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    save_profile(recorded.profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == recorded.profile
    manager.close()


def test_the_peaks_of_the_process_are_left_alone():
    model = make_model(layers=2)
    inputs = make_inputs(model)
    manager = make_manager()
    run_step(model, manager, inputs)
    torch.cuda.reset_peak_memory_stats()
    torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.max_memory_allocated()
    with profile_step(manager):
        run_step(model, manager, inputs)
    assert torch.cuda.max_memory_allocated() == before
    manager.close()


def test_times_of_a_real_device():
    manager = make_manager(prefetch_bytes=0)
    x = torch.ones(16 << 20, device="cuda", requires_grad=True) * 1
    with trace_step(manager) as trace, manager.step():
        manager.begin_chunk()
        y = start_group(manager, x, "x")
        with manager:
            y = y.exp()
        y = commit_group(manager, y, "x").sum()  # else this function would keep what was saved
        y.backward()
    num_bytes = x.nbytes
    (d2h,), (h2d,) = trace.of("d2h"), trace.of("h2d")
    assert 0 <= d2h.start_us < d2h.end_us <= h2d.start_us < h2d.end_us
    assert trace.num_bytes == {"d2h": num_bytes, "h2d": num_bytes}
    copies_us = d2h.end_us - d2h.start_us + h2d.end_us - h2d.start_us
    assert trace.copy_stall_us == pytest.approx(copies_us, rel=0.5)
