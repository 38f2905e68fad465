"""Bandwidths on the simulated device's virtual clock, and the turns that ranks take."""

from __future__ import annotations

import pytest
import torch

from megatron_offload.backends.base import Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig
from megatron_offload.errors import ConfigError, HazardError
from megatron_offload.machine import bandwidth
from megatron_offload.machine.bandwidth import (
    BandwidthError,
    gbps_while_all_copy,
    measure_copies,
)

KIB = 1024


def make_backend(timing="late", kind=SimulatedBackend, **settings):
    return kind(SimulatedConfig(d2h_gbps=25, h2d_gbps=50, copy_timing=timing), **settings)


@pytest.mark.parametrize("timing", ["eager", "late", "random"])
def test_each_direction_gets_what_its_stream_carries(timing):
    rates = measure_copies(make_backend(timing), block_bytes=64 * KIB)
    values = rates.model_dump()
    assert {name: values[name] for name in values if "d2h" in name} == pytest.approx(
        {"d2h_gbps": 25, "both_d2h_gbps": 25, "node_d2h_gbps": 25}
    )
    assert {name: values[name] for name in values if "h2d" in name} == pytest.approx(
        {"h2d_gbps": 50, "both_h2d_gbps": 50, "node_h2d_gbps": 50}
    )


@pytest.mark.parametrize("wait", [Wait.W1, Wait.W6])
def test_copies_are_ordered_after_what_used_their_memory(wait):
    with pytest.raises(HazardError, match=wait.name):
        measure_copies(make_backend(removed_waits=frozenset({wait})), block_bytes=64 * KIB)


class OneEngine(SimulatedBackend):
    """Copies in one direction push the other's back: they share what carries them."""

    def copy(self, pairs, stream, label):
        for other in (self.d2h_stream, self.h2d_stream):
            stream.time_us = max(stream.time_us, other.time_us)
        super().copy(pairs, stream, label)


def test_directions_that_share_an_engine_are_slower_together():
    rates = measure_copies(make_backend(kind=OneEngine), block_bytes=64 * KIB)
    assert rates.d2h_gbps == pytest.approx(25)
    assert rates.h2d_gbps == pytest.approx(50)
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
        super().copy(pairs, stream, label)


def test_a_link_that_wakes_slowly_is_measured_awake():
    rates = measure_copies(make_backend(kind=SlowStart), block_bytes=64 * KIB)
    assert rates.d2h_gbps == pytest.approx(25)


def test_links_are_looked_at_while_copies_are_under_way():
    backend = make_backend("late")
    pending = []
    measure_copies(
        backend, block_bytes=64 * KIB, while_copying=lambda: pending.append(backend.num_pending)
    )
    assert pending
    assert all(pending)


def test_host_memory_is_given_back(monkeypatch):
    pools = []

    class Pool(bandwidth.HostPool):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            pools.append(self)

    monkeypatch.setattr(bandwidth, "HostPool", Pool)
    measure_copies(make_backend(), block_bytes=64 * KIB)
    (pool,) = pools
    assert pool.stats.peak_slab_bytes == 2 * 64 * KIB
    assert pool.stats.slab_bytes_total == 0


class Unpinnable(SimulatedBackend):
    def empty_host(self, num_bytes):
        raise RuntimeError("pinning failed: out of memory")


def test_memory_that_can_t_be_pinned_is_named():
    with pytest.raises(BandwidthError, match=r"131072 bytes.*pinning failed: out of memory"):
        measure_copies(make_backend(kind=Unpinnable), block_bytes=64 * KIB)


def test_too_little_host_memory_is_named(monkeypatch):
    monkeypatch.setattr("megatron_offload.memory.host_pool.default_cap_bytes", lambda share: 70_000)
    with pytest.raises(BandwidthError, match=r"131072 bytes.*can't be had: 70000 may be used"):
        measure_copies(make_backend(), block_bytes=64 * KIB)


# The arithmetic.


def test_only_the_time_in_which_all_copy_counts():
    # The second direction begins 10 us later and goes on for long: from 20 to 30 us both copy.
    ends = [[0.0, 10.0, 20.0, 30.0], [20.0, 25.0, 30.0, 35.0, 40.0]]
    assert gbps_while_all_copy(ends, 1000) == pytest.approx([0.1, 0.2])


def test_a_part_of_a_copy_counts_in_part():
    assert gbps_while_all_copy([[0.0, 10.0], [5.0, 25.0]], 1000) == pytest.approx([0.1, 0.05])


def test_directions_that_took_turns_share_the_time():
    ends = [[0.0, 10.0, 20.0], [30.0, 40.0]]
    assert gbps_while_all_copy(ends, 1000) == pytest.approx([0.05, 0.025])


# Ranks.


class Group:
    """Stands in for `torch.distributed` on one rank of two; notes when ranks would meet."""

    def __init__(self, monkeypatch, local_rank, sizes):
        self.log = []
        self.sizes = sizes
        for name in ("is_initialized", "get_world_size", "all_gather_object", "barrier"):
            monkeypatch.setattr(torch.distributed, name, getattr(self, name))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes[0]))

    def is_initialized(self):
        return True

    def get_world_size(self):
        return len(self.sizes)

    def all_gather_object(self, into, mine):
        assert mine == self.sizes[0]
        into[:] = self.sizes

    def barrier(self):
        self.log.append("barrier")


def measure_as(group):
    measure_copies(
        make_backend(), block_bytes=4 * KIB, while_copying=lambda: group.log.append("copies")
    )
    return group.log


ALONE = ["copies"] * 10
TOGETHER = ["barrier", "copies"] * 3


def test_ranks_copy_alone_in_turn_and_then_together(monkeypatch):
    first = measure_as(Group(monkeypatch, 0, [2, 2]))
    assert first == ["barrier", *ALONE, "barrier", *TOGETHER]
    second = measure_as(Group(monkeypatch, 1, [2, 2]))
    assert second == ["barrier", "barrier", *ALONE, *TOGETHER]


def test_ranks_of_machines_of_different_sizes_meet_equally_often(monkeypatch):
    small = measure_as(Group(monkeypatch, 0, [1, 3, 3, 3]))
    large = measure_as(Group(monkeypatch, 2, [3, 3, 3, 1]))
    assert small.count("barrier") == large.count("barrier") == 6


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_ranks_without_torchrun_s_variables_are_told(monkeypatch, name):
    group = Group(monkeypatch, 0, [2, 2])
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=name):
        measure_as(group)
