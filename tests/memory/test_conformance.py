"""What each backend and each resource that allocates host memory of it must hold.

On the simulated device at every extreme of its copies, and on a GPU where there is one.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from programs import Forgetful
from traps import LineTrap

from megatron_offload.backends.base import Wait
from megatron_offload.backends.cuda import CudaBackend
from megatron_offload.config import SimulatedConfig
from megatron_offload.megatron_api.tensor_pool import HostTensorPool
from megatron_offload.memory.host_pool import HostPool
from megatron_offload.memory.layout import ALIGNMENT_BYTES

KIB = 1024
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["eager", "late", "late_d2h_eager_h2d", "random", GPU])
def backend(request):
    if request.param == "cuda":
        return CudaBackend()
    return Forgetful(SimulatedConfig(copy_timing=request.param), raises=True)


class Regions:
    """`HostPool`: who writes to what it allocates waits for the region's event."""

    def __init__(self, backend, slab=32 * KIB, cap=256 * KIB):
        self.backend, self.read = backend, {}
        self.host_pool = HostPool(backend, slab_bytes=slab, cap_bytes=cap)

    def allocate(self, num_bytes):
        region = self.host_pool.allocate(num_bytes)
        if region is not None and region.ready_event is not None:
            self.backend.wait(self.backend.d2h_stream, region.ready_event, Wait.W5)
        return region

    def free(self, region, is_read=True):
        event = self.backend.record(self.backend.h2d_stream) if is_read else None
        if is_read:
            self.read[event] = len(self.read)
        self.host_pool.free(region, event)

    def memory(self, region):
        return region.tensor


class HostTensors(Regions):
    """`HostTensorPool`: what it allocates may be written to at once."""

    def __init__(self, backend, **bounds):
        super().__init__(backend, **bounds)
        self.pool = HostTensorPool(self.host_pool, backend)

    def allocate(self, num_bytes):
        with contextlib.suppress(RuntimeError):
            return self.pool.allocate((num_bytes,), torch.uint8)

    def free(self, tensor, is_read=True):
        self.pool.free(tensor)

    def memory(self, tensor):
        return tensor


RESOURCES = pytest.mark.parametrize("kind", [Regions, HostTensors])


def filled(backend, value, num_bytes):
    return backend.empty_device_like(torch.empty(num_bytes, dtype=torch.uint8)).fill_(value)


def offload(backend, pairs):
    """Copy to the host what the compute stream has written."""
    for _, source in pairs:
        backend.note_produced(source, "x")
    backend.wait_compute(backend.d2h_stream, Wait.W1)
    return backend.copy(pairs, backend.d2h_stream, "x")


def reload(backend, hosts, after):
    """Return new tensors to which memory of the host is copied, and the event behind that."""
    targets = [backend.empty_device_like(host) for host in hosts]
    backend.wait_compute(backend.h2d_stream, Wait.W6)
    backend.wait(backend.h2d_stream, after, Wait.W3)
    return targets, backend.copy(list(zip(targets, hosts, strict=True)), backend.h2d_stream, "x")


# Backends


@pytest.mark.parametrize("num_bytes", [2, 4098, 3 << 20])
def test_copies_bring_every_bit_to_the_host_and_back_after_a_refusal(backend, num_bytes):
    copies_many = getattr(backend, "_copy_many", None)
    numbers = torch.randint(256, (9, num_bytes), dtype=torch.uint8)
    sources = [backend.empty_device_like(row).copy_(row).view(torch.int16) for row in numbers]
    with pytest.raises(RuntimeError):
        backend.empty_host(1 << 62)
    hosts = backend.empty_host(9 * num_bytes).view(torch.int16).split(num_bytes // 2)
    assert hosts[0].is_pinned() is (backend.name == "cuda")
    for _ in range(3):  # each waits for the kernels before it
        for source in sources:
            source.add_(1)
        left = offload(backend, list(zip(hosts, sources, strict=True)))
        targets, back = reload(backend, hosts, left)
        backend.wait(backend.compute_stream(), back, Wait.W4)
        backend.wait(backend.d2h_stream, back, Wait.W5)
        assert all(map(torch.equal, sources, targets))
    backend.sync_copies()
    assert backend.is_done(left)
    assert backend.is_done(back)
    assert getattr(backend, "_copy_many", None) is copies_many, "the driver has refused"


# What allocates host memory


@RESOURCES
@pytest.mark.parametrize("seed", range(8))
def test_live_memory_never_overlaps_and_knows_its_last_reader_whatever_is_asked(kind, seed):
    rng = random.Random(seed)
    resource = kind(Forgetful(SimulatedConfig(copy_timing="eager", check_hazards=False)))
    pool, live, last_read, num_refused = resource.host_pool, {}, {}, 0
    common = [rng.randint(1, 20 * KIB) for _ in range(5)]
    for step in range(1500):
        if live and rng.random() < 0.48:
            mark = rng.choice(list(live))
            handle, span = live.pop(mark)
            assert bool((resource.memory(handle) == mark).all()), f"seed {seed}, step {step}"
            is_read = rng.random() < 0.5
            resource.free(handle, is_read)
            last_read |= dict.fromkeys(span if is_read else (), len(resource.read) - 1)
        elif len(live) < 250:
            size = rng.choice(common) if rng.random() < 0.7 else rng.randint(1, 40 * KIB)
            handle = resource.allocate(size)
            num_refused += handle is None
            if handle is not None:
                memory = resource.memory(handle)
                assert (memory.nbytes, memory.storage_offset() % ALIGNMENT_BYTES) == (size, 0)
                mark = next(value for value in range(256) if value not in live)
                memory.fill_(mark)
                start = memory.data_ptr()
                live[mark] = handle, range(start, start + size, ALIGNMENT_BYTES)
                if kind is Regions:
                    known = resource.read.get(handle.ready_event, -1)
                    assert known >= max(last_read.get(at, -1) for at in live[mark][1])
        if rng.random() < 0.01 and pool.shrink():
            last_read.clear()  # memory at the same addresses may be new
        assert pool.stats.in_use_bytes <= pool.stats.slab_bytes_total <= pool.cap_bytes
    for handle, _ in live.values():
        resource.free(handle)
    assert pool.stats.in_use_bytes == 0
    assert pool.shrink() > 0
    assert pool.stats.slab_bytes_total == 0
    assert num_refused > 0


@RESOURCES
def test_memory_freed_before_its_copy_is_over_is_overwritten_after_it(backend, kind):
    resource, num_bytes = kind(backend), 4 * KIB
    sevens, eights = filled(backend, 7, num_bytes), filled(backend, 8, num_bytes)
    first = resource.allocate(num_bytes)
    at = resource.memory(first).data_ptr()
    left = offload(backend, [(resource.memory(first), sevens)])
    (target,), back = reload(backend, [resource.memory(first)], left)
    resource.free(first)
    second = resource.allocate(num_bytes)
    assert resource.memory(second).data_ptr() == at, "it serves at once"
    offload(backend, [(resource.memory(second), eights)])
    backend.sync_copies()
    backend.wait(backend.compute_stream(), back, Wait.W4)
    assert bool((target == 7).all())
    assert bool((resource.memory(second) == 8).all())


def test_an_interrupt_at_any_line_loses_and_doubles_nothing_that_is_recovered():
    trap, position = LineTrap(), 0
    while position is not None:
        resource = Regions(Forgetful(SimulatedConfig(), raises=True), slab=4 * KIB)
        kept = [resource.allocate(KIB) for _ in range(6)]
        dropped = kept[::2]
        del kept[::2]
        trap.arm(position)
        try:
            for handle in dropped:
                resource.free(handle)
            kept += [resource.allocate(1536), resource.allocate(6 * KIB)]  # one is cut, one pinned
            position = None
        except KeyboardInterrupt:
            position += 1
        finally:
            trap.disarm()
        pool = resource.host_pool
        pool.recover(lambda region, kept=kept: int(region in kept))
        assert pool.stats.in_use_bytes == sum(region.size_bytes for region in kept)
        kept += map(resource.allocate, [KIB, 3 * KIB, 4 * KIB] * 3)
        for mark, region in enumerate(kept):
            assert resource.memory(region).fill_(mark).nbytes == region.size_bytes
        for mark, region in enumerate(kept):
            assert bool((resource.memory(region) == mark).all())
            resource.free(region)
        for region in dropped:
            with pytest.raises(ValueError, match="freed before"):
                resource.free(region)
        pool.shrink()
        assert (pool.stats.in_use_bytes, pool.stats.slab_bytes_total) == (0, 0)
    assert trap.num_calls > 100
