import weakref

import pytest
import torch

from megatron_offload.backends.base import Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.machine import job_ranks
from megatron_offload.memory.host_pool import HostPool
from megatron_offload.memory.host_region import Piece

KIB = 1024


class Unpinnable(SimulatedBackend):
    """Refuses to pin more than ``limit_bytes`` at a time."""

    def __init__(self, limit_bytes, error=RuntimeError):
        super().__init__(SimulatedConfig())
        self.limit_bytes = limit_bytes
        self.error = error
        self.asked = []

    def empty_host(self, num_bytes):
        self.asked.append(num_bytes)
        if num_bytes > self.limit_bytes:
            raise self.error("cannot pin")
        return super().empty_host(num_bytes)


class Ready(SimulatedBackend):
    """Has so many slabs ready to be pinned."""

    num_host_prepared = 3


@pytest.fixture
def backend():
    return SimulatedBackend(SimulatedConfig())


def make(backend, slab=64 * KIB, cap=1024 * KIB):
    return HostPool(backend, slab_bytes=slab, cap_bytes=cap)


def h2d_event(backend):
    """An event behind a copy that has not happened."""
    host = backend.empty_host(8)
    target = backend.empty_device_like(host)
    backend.wait(backend.h2d_stream, backend.record(backend.compute_stream()), Wait.W6)
    backend.copy([(target, host)], backend.h2d_stream, "x")
    return backend.record(backend.h2d_stream)


def span(region):
    start = region.tensor.data_ptr()
    return start, start + region.tensor.nbytes


# The cap, and pinning that fails.


@pytest.mark.parametrize(("cap", "last"), [(8 * KIB, 4 * KIB), (6 * KIB + 100, 2 * KIB), (0, 0)])
def test_slabs_are_as_large_as_the_cap_allows_and_over_it_the_answer_is_none(backend, cap, last):
    pool = make(backend, slab=4 * KIB, cap=cap)
    for size in (4 * KIB, last) if cap else ():
        assert pool.allocate(size) is not None
    assert pool.allocate(1000) is None
    assert pool.allocate(100 * KIB) is None
    assert pool.stats.slab_bytes_total == cap // KIB * KIB


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_counters_and_warnings_tell_the_cap_from_memory_that_can_t_be_pinned(error, caplog):
    backend = Unpinnable(4 * KIB, error)
    pool = make(backend, slab=4 * KIB, cap=16 * KIB)
    regions = [pool.allocate(size * KIB) for size in (4, 8, 8, 20, 20)]
    assert [region is None for region in regions] == [False, True, True, True, True]
    assert pool.stats.num_unpinnable == 2
    assert backend.asked == [4 * KIB, 8 * KIB]
    unpinnable, full = [record.getMessage() for record in caplog.records]
    assert unpinnable.startswith("host memory can't be pinned: asked 8.0 KiB")
    assert "cannot pin" in unpinnable
    assert "cannot pin" in pool.last_pin_error
    assert full == (
        "host pool is full: asked 20.0 KiB, 4.0 KiB in use, 4.0 KiB of 16.0 KiB pinned; the "
        "tensors are kept on the device (raise host_memory_bytes or lower the fraction)"
    )


def test_what_could_not_be_pinned_keeps_nothing_alive():
    class Mine:
        pass

    pool = make(Unpinnable(0))
    mine = Mine()
    gone = weakref.ref(mine)

    def ask(mine):
        assert pool.allocate(1000) is None

    ask(mine)
    del mine
    assert gone() is None


def test_where_a_slab_can_t_be_pinned_less_is():
    backend = Unpinnable(8 * KIB)
    pool = make(backend)
    for _ in range(3):
        assert pool.allocate(6 * KIB) is not None
    assert backend.asked == [64 * KIB, 6 * KIB, 6 * KIB, 6 * KIB], "smaller ones are tried"
    backend.limit_bytes = 0
    assert pool.allocate(6 * KIB) is None
    assert pool.allocate(6 * KIB) is None
    assert len(backend.asked) == 5, "what could not be pinned is not tried again until shrink"
    backend.limit_bytes = 1024 * KIB
    pool.shrink()
    assert pool.allocate(6 * KIB) is not None


# Giving back.


def test_what_shrink_lets_go_is_held_by_the_backend_s_list_alone(backend, monkeypatch):
    gone = []
    monkeypatch.setattr(backend, "discard", gone.append)
    pool = make(backend, slab=4 * KIB)
    regions = [pool.allocate(2 * KIB) for _ in range(4)]
    for region in regions[:3]:
        pool.free(region, None)
    memory = weakref.ref(pool._slabs[0].base)
    del region, regions
    assert pool.shrink() == 4 * KIB, "slabs that are wholly free"
    assert memory() is not None
    gone[0].clear()
    assert memory() is None
    assert (pool.stats.slab_bytes_total, pool.stats.peak_slab_bytes) == (4 * KIB, 8 * KIB)
    assert pool.allocate(2 * KIB) is not None
    assert pool.stats.slab_bytes_total == 4 * KIB


def test_shrink_keeps_a_slab_whose_last_copy_is_under_way(backend):
    pool, event = make(backend), h2d_event(backend)
    pool.free(pool.allocate(1000), event)
    assert pool.shrink() == 0
    backend.sync_copies()
    assert pool.shrink() == 64 * KIB


def test_closing_waits_for_copies_twice_is_fine_and_late_frees_too(backend):
    pool, event = make(backend), h2d_event(backend)
    pool.free(pool.allocate(500), event)
    region = pool.allocate(1000)
    region.tensor.fill_(3)
    pool.close()
    pool.close()
    assert backend.is_done(event)
    assert region.tensor.sum() == 3000
    pool.free(region, None)
    assert (pool.stats.in_use_bytes, pool.stats.slab_bytes_total) == (0, 0)
    with pytest.raises(ValueError, match="closed"):
        pool.allocate(1)


# The default cap.


def test_a_rank_s_share_falls_as_more_ranks_are_known(monkeypatch):
    ranks = [1]
    monkeypatch.setattr(job_ranks, "default_cap_bytes", lambda share: int(share * 32 * KIB))
    monkeypatch.setattr(job_ranks, "num_local_ranks", lambda: ranks[0])
    settings = {"host_memory_share": 0.25, "host_slab_bytes": 4 * KIB, "backend": "simulated"}
    pool = PipelineOffloadManager(OffloadConfig(**settings)).host_pool
    assert pool.cap_bytes == 8 * KIB
    few = PipelineOffloadManager(OffloadConfig(**settings, host_memory_bytes=7))
    assert few.host_pool.cap_bytes == 7
    assert pool.allocate(KIB)
    ranks[0] = 4
    assert not pool.allocate(4 * KIB)


def test_a_region_of_several_parts_shows_each_as_it_was_asked_for(backend):
    pool = make(backend)
    specs = [(1024, (torch.Size([16, 32]), torch.bfloat16)), (100, None)]
    region = pool.allocate_views(specs)
    shaped, flat = region.views
    assert (shaped.dtype, shaped.shape, flat.nbytes) == (torch.bfloat16, (16, 32), 100)
    assert flat.data_ptr() == shaped.data_ptr() + 1024
    assert pool.stats.in_use_bytes == 1536
    pool.free(region, None)
    assert pool.stats.in_use_bytes == 1536, "one part is allocated still"
    pool.free(region, None)
    assert pool.stats.in_use_bytes == 0
    assert pool.allocate_views(list(specs)).views[0] is shaped


def test_bytes_that_are_allocated_in_turn_in_several_shapes_are_shown_once_in_each(
    backend, monkeypatch
):
    pool, num_shown = make(backend, slab=2 * KIB), []
    show = Piece.show
    monkeypatch.setattr(
        Piece, "show", lambda piece, specs: num_shown.append(specs) or show(piece, specs)
    )
    likes = [(torch.Size([16, 32]), torch.bfloat16), (torch.Size([256]), torch.float32), None]
    seen = []
    for like in likes * 3:
        region = pool.allocate(KIB, like)
        assert like is None or (region.tensor.shape, region.tensor.dtype) == like
        seen.append(region.tensor.data_ptr())
        pool.free(region, None)
    assert len(num_shown) == 2 * len(likes)  # the slab has two such pieces, allocated in turn
    for num_dimensions in range(50):  # as many shapes as a program likes
        like = torch.Size([1] * num_dimensions + [KIB]), torch.uint8
        pool.free(pool.allocate(KIB, like), None)
    assert all(len(piece.views) < 10 for slab in pool._slabs for piece in slab)


def test_the_event_of_the_part_that_was_read_last_counts(backend):
    pool, first, second = make(backend, slab=2 * KIB), h2d_event(backend), h2d_event(backend)
    region, other = pool.allocate_views([(512, None)] * 2), pool.allocate(1024)
    pool.free(region, first)
    pool.free(other, second)
    pool.free(region, None)  # later, but read before
    assert pool.allocate(2048).ready_event is second


def test_bytes_are_counted_by_name_with_their_peak(backend):
    pool = make(backend)
    first, second = pool.allocate(512), pool.allocate(1024)
    pool.count_alone(first, "a", 512)
    pool.count_alone(second, "b", 1000)
    pool.count_alone(second, "b", 24)
    pool.free(second, None)
    assert pool.alone.peak() == (1536, {"a": 512, "b": 1024})
    assert pool.stats.peak_in_use_bytes == 1536
    assert (pool.stats.in_use_bytes, pool.alone.total_bytes) == (512, 512)
    pool.restart_peaks()
    assert (pool.alone.peak()[0], pool.stats.peak_in_use_bytes) == (512, 512)
    pool.free(first, None)
    assert not any(pool.alone.by_name.values())


def test_steps_whose_sizes_change_pin_no_more_than_the_largest_of_them(backend):
    pool, pinned = make(backend, slab=128 * KIB), []
    for length in (16, 10, 6, 16, 10, 6, 16):
        regions = [pool.allocate(size * KIB * length // 16) for size in (31, 89) * 4]
        for region in regions:
            pool.free(region, None)
        pinned.append(pool.stats.slab_bytes_total)
    assert set(pinned) == {4 * 128 * KIB}, "each slab holds one of either"


@pytest.mark.parametrize(("cap", "num_slabs"), [(1024, 3), (130, 2), (10, 0)])
def test_what_is_ready_is_pinned_as_far_as_the_cap_allows(cap, num_slabs):
    pool = make(Ready(SimulatedConfig()), cap=cap * KIB)
    pool.pin_prepared()
    assert pool.stats.slab_bytes_total == num_slabs * 64 * KIB
    regions = [pool.allocate(64 * KIB) for _ in range(num_slabs)]
    assert pool.stats.slab_bytes_total == num_slabs * 64 * KIB, "it serves what comes"
    for region in regions:
        pool.free(region, None)
