"""Bandwidths on the simulated device's virtual clock, the turns that ranks take, and processes."""

from __future__ import annotations

import os
import signal
import weakref

import pytest
import torch

from megatron_offload.backends.base import DeviceInfo, Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.errors import HazardError
from megatron_offload.machine import bandwidth
from megatron_offload.machine.bandwidth import (
    BandwidthError,
    gbps_while_all_copy,
    measure_copies,
    measure_gpus,
)
from megatron_offload.machine.profile import PciLink, PciPath

KIB = 1024


def measured_rates(*args, **settings):
    """Return what is measured with small blocks."""
    return measure_copies(make_backend(*args, **settings), block_bytes=64 * KIB).rates


def make_backend(timing="late", kind=SimulatedBackend, **settings):
    return kind(SimulatedConfig(d2h_gbps=25, h2d_gbps=50, copy_timing=timing), **settings)


@pytest.mark.parametrize("timing", ["eager", "late", "random"])
def test_each_direction_gets_what_its_stream_carries(timing):
    rates = measured_rates(timing).model_dump()
    assert rates == pytest.approx({name: 25 if "d2h" in name else 50 for name in rates})


@pytest.mark.parametrize("wait", [Wait.W1, Wait.W6])
def test_copies_are_ordered_after_what_used_their_memory(wait):
    with pytest.raises(HazardError, match=wait.name):
        measured_rates(removed_waits=frozenset({wait}))


class OneEngine(SimulatedBackend):
    """Copies in one direction push the other's back: they share what carries them."""

    def copy(self, pairs, stream, label):
        for other in (self.d2h_stream, self.h2d_stream):
            stream.time_us = max(stream.time_us, other.time_us)
        return super().copy(pairs, stream, label)


def test_directions_that_share_an_engine_are_slower_together():
    rates = measured_rates(kind=OneEngine)
    assert (rates.d2h_gbps, rates.h2d_gbps) == pytest.approx((25, 50))
    # A block each way takes 1/25 + 1/50: both get 16.7 GB/s.
    assert rates.both_d2h_gbps == pytest.approx(50 / 3, rel=0.15)
    assert rates.both_h2d_gbps == pytest.approx(50 / 3, rel=0.15)


class SlowStart(SimulatedBackend):
    """The first copies after a while take long, as on a link that has to wake."""

    num_slow = 4

    def copy(self, pairs, stream, label):
        if self.num_slow:
            self.num_slow -= 1
            stream.time_us += 1e6
        return super().copy(pairs, stream, label)


def test_a_link_that_wakes_slowly_is_measured_awake():
    rates = measured_rates(kind=SlowStart)
    assert rates.d2h_gbps == pytest.approx(25)


def test_links_are_looked_at_while_copies_are_under_way(monkeypatch):
    backend = make_backend("late")
    backend.describe = lambda: DeviceInfo("a GPU", "0000:3b:00.0")
    link, pending = PciLink(generation=5, width=16), []

    def look(address):
        assert address == "0000:3b:00.0"
        pending.append(backend.num_pending)
        return PciPath(now=link, most=link)

    monkeypatch.setattr(bandwidth, "read_pci_path", look)
    assert measure_copies(backend, block_bytes=64 * KIB).pci.now == link
    assert pending
    assert all(pending)


class Unpinnable(SimulatedBackend):
    def empty_host(self, num_bytes):
        raise RuntimeError("pinning failed: out of memory")


class Full(SimulatedBackend):
    def empty_device(self, num_bytes):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")


@pytest.mark.parametrize(
    ("kind", "why"), [(Unpinnable, "pinning failed: out of memory"), (Full, "CUDA out of memory.")]
)
def test_memory_that_can_t_be_had_is_named(kind, why):
    with pytest.raises(BandwidthError, match=rf"two blocks of 65536 bytes: {why}$"):
        measured_rates(kind=kind)


# The arithmetic.


@pytest.mark.parametrize(
    ("ends_us", "gbps"),
    [
        # The second direction begins 10 us later and goes on for long: from 20 to 30 us both copy.
        ([[0, 10, 20, 30], [20, 25, 30, 35, 40]], [0.1, 0.2]),
        ([[0, 10], [5, 25]], [0.1, 0.05]),  # a part of a copy counts in part
        ([[0, 10, 20], [30, 40]], [0.05, 0.025]),  # those that took turns share the time
    ],
)
def test_only_the_time_in_which_all_copy_counts(ends_us, gbps):
    assert gbps_while_all_copy(ends_us, 1000) == pytest.approx(gbps)


# Ranks.


class Group:
    """Stands in for `torch.distributed` on one rank of several; notes when ranks would meet."""

    def __init__(self, monkeypatch, rank, num_ranks, problems=None):
        self.log = []
        self.rank, self.num_ranks = rank, num_ranks
        self.problems = problems or [""] * num_ranks
        names = ("is_initialized", "get_world_size", "get_rank", "all_gather_object", "barrier")
        for name in names:
            monkeypatch.setattr(torch.distributed, name, getattr(self, name))
        monkeypatch.setattr(bandwidth, "read_pci_path", lambda address: self.log.append("copies"))

    def is_initialized(self):
        return True

    def get_world_size(self, group=None):
        return self.num_ranks

    def get_rank(self, group=None):
        return self.rank

    def all_gather_object(self, into, mine, group=None):
        into[:] = self.problems
        into[self.rank] = mine or self.problems[self.rank]

    def barrier(self):
        self.log.append("barrier")


def measure_as(group, kind=SimulatedBackend):
    measure_copies(make_backend(kind=kind), block_bytes=64 * KIB)
    return group.log


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_ranks_copy_alone_in_turn_and_then_together_and_meet_equally_often(
    monkeypatch, num_ranks, rank
):
    log = measure_as(Group(monkeypatch, rank, num_ranks))
    alone, together = ["copies"] * 10, ["barrier", "copies"] * 3
    before, behind = ["barrier"] * (rank + 1), ["barrier"] * (num_ranks - rank - 1)
    assert log == [*before, *alone, *behind, *together]


def test_a_rank_that_lacks_memory_keeps_no_other_waiting(monkeypatch):
    group = Group(monkeypatch, 0, 2, ["", "too little"])
    with pytest.raises(BandwidthError, match="rank 1: too little"):
        measure_as(group)
    failing = Group(monkeypatch, 1, 2)
    with pytest.raises(BandwidthError, match=r"rank 1: two blocks.*pinning failed"):
        measure_as(failing, Unpinnable)
    assert group.log == failing.log == []


def test_the_error_of_a_measurement_holds_no_memory(monkeypatch):
    blocks = []

    class Watched(SimulatedBackend):
        def empty_device(self, num_bytes):
            block = super().empty_device(num_bytes)
            blocks.append(weakref.ref(block.untyped_storage()))
            return block

    with pytest.raises(BandwidthError) as caught:
        measure_as(Group(monkeypatch, 0, 2, ["", "too little"]), Watched)
    assert caught.value.__traceback__ is not None
    assert [block() for block in blocks] == [None, None]


# Processes.


SIMULATED = OffloadConfig(backend="simulated", simulated=SimulatedConfig(d2h_gbps=25, h2d_gbps=50))


def children():
    """Return the processes that this one has started and that are not gone."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


@pytest.mark.slow
def test_every_gpu_has_a_process_and_a_result():
    gpus = measure_gpus(2, config=SIMULATED, block_bytes=1 << 16)
    assert len(gpus) == 2
    for gpu in gpus:
        assert gpu.rates.d2h_gbps == pytest.approx(25)
        assert gpu.rates.node_h2d_gbps == pytest.approx(50)
        assert gpu.pci is None


@pytest.mark.slow
def test_a_process_that_fails_is_told_with_its_reason():
    with pytest.raises(BandwidthError, match=r"measuring GPU 0 failed: .*blocks of -1 bytes"):
        measure_gpus(1, config=SIMULATED, block_bytes=-1)


def wait_forever(*arguments):
    signal.pause()


def test_processes_that_take_too_long_are_killed(monkeypatch):
    monkeypatch.setattr(bandwidth, "_measure_one", wait_forever)
    before = children()
    with pytest.raises(BandwidthError, match=r"not done within 0\.1 s"):
        measure_gpus(1, config=SIMULATED, timeout_s=0.1)
    assert children() <= before | children_of_tracker()


def children_of_tracker():
    """Return Python's own helper of spawned processes, which stays."""
    from multiprocessing import resource_tracker

    return {str(resource_tracker._resource_tracker._pid)}
