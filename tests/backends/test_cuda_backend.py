"""The CUDA backend with a made-up runtime: what it pins, what a failure does, what it tells."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_offload.backends import cuda
from megatron_offload.backends.base import DeviceMemory

KIB = 1024
ALREADY_REGISTERED = 712


class Runtime:
    """Stands in for ``torch.cuda.cudart()``; keeps a failed call's error, as CUDA does."""

    def __init__(self):
        self.answer = 0
        self.last_error = 0
        self.pinned = {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - CUDA's name
        assert flags == 0
        if self.answer == 0:
            self.pinned[address] = num_bytes
        else:
            self.last_error = self.answer
        return self.answer

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        if self.pinned.pop(address, None) is None:
            self.last_error = 1
            return 1
        return 0

    def cudaGetErrorString(self, error):  # noqa: N802 - CUDA's name
        return f"the reason of {error}"


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(cuda, "_clear_last_error", lambda: setattr(runtime, "last_error", 0))
    return runtime


@pytest.fixture
def backend(monkeypatch):
    """One without a device, outside a capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend = object.__new__(cuda.CudaBackend)
    backend.device = torch.device("cuda", 3)
    backend._pin_memory, backend._is_for_graphs = True, False
    backend._near_cpus, backend._ahead = frozenset(), cuda._PagesAhead()
    return backend


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages"
)
def test_pages_are_large_where_the_system_has_such():
    pages = cuda._PinnedPages(4 << 20)
    address, is_inside, found = torch.frombuffer(pages, dtype=torch.uint8).data_ptr(), False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(span[1], 16) <= address < int(span[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            found = line.split()
    assert "hg" in found


def test_pages_are_pinned_for_as_long_as_anything_refers_to_them(runtime):
    pages = cuda._PinnedPages(8 * KIB)
    pages.pin()
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    del pages
    assert runtime.pinned == {tensor.data_ptr(): 8 * KIB}
    view = tensor[:10]
    del tensor
    gc.collect()
    assert runtime.pinned
    del view
    gc.collect()
    assert not runtime.pinned
    assert runtime.last_error == 0


@pytest.mark.parametrize(("pause_s", "num_left"), [(0.0, 0), (3600.0, 2)])
def test_what_is_let_go_is_unpinned_one_by_one(pause_s, num_left, backend, runtime, monkeypatch):
    monkeypatch.setattr(cuda, "_DROP_S", pause_s)
    memory = [cuda._PinnedPages(8 * KIB) for _ in range(3)]
    for pages in memory:
        pages.pin()
    del pages
    backend.discard(memory)
    deadline = time.monotonic() + 10
    while len(runtime.pinned) > num_left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(runtime.pinned) == num_left


def test_a_failed_pin_says_why_and_neither_it_nor_a_failed_unpin_leaves_an_error_behind(runtime):
    runtime.answer = ALREADY_REGISTERED
    with pytest.raises(RuntimeError, match="8192 bytes of host memory failed: the reason of 712"):
        cuda._PinnedPages(8 * KIB).pin()
    gc.collect()
    assert runtime.last_error == 0, "the next kernel would raise"
    runtime.answer, pages = 0, cuda._PinnedPages(8 * KIB)
    pages.pin()
    runtime.pinned.clear()
    del pages
    gc.collect()
    assert runtime.last_error == 0


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 63, 1 << 70])
def test_memory_that_can_not_be_had_is_an_error_of_the_documented_kind(runtime, num_bytes):
    with pytest.raises(RuntimeError, match=f"{num_bytes} bytes of host memory can't be had"):
        cuda._PinnedPages(num_bytes)
    assert not runtime.pinned


def test_pages_are_registered_next_to_the_device(backend, runtime, monkeypatch):
    backend._near_cpus, ran_on = frozenset({max(os.sched_getaffinity(0))}), []
    monkeypatch.setattr(cuda, "_register", lambda *_: ran_on.append(os.sched_getaffinity(0)))
    assert backend.empty_host(8 * KIB).nbytes == 8 * KIB
    assert ran_on == [backend._near_cpus]


def test_pages_that_were_touched_ahead_are_pinned_first_and_the_rest_goes(backend, runtime):
    backend.prepare_host(8 * KIB, 2)
    deadline = time.monotonic() + 10
    while len(backend._ahead.ready) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    ahead = [
        torch.frombuffer(pages, dtype=torch.uint8).data_ptr() for pages in backend._ahead.ready
    ]
    assert not runtime.pinned
    assert backend.num_host_prepared == 2
    other = backend.empty_host(4 * KIB)
    regions = [backend.empty_host(8 * KIB) for _ in range(3)]
    assert [region.data_ptr() for region in regions[:2]] == ahead
    assert (len(runtime.pinned), backend.num_host_prepared) == (4, 0)
    backend.prepare_host(8 * KIB, 1)
    backend.prepare_host(8 * KIB, 0)
    del other, regions
    gc.collect()
    assert not runtime.pinned


def test_a_capture_pins_nothing_and_waits_for_nothing(backend, monkeypatch):
    backend._pin_memory = False
    backend.d2h_stream = backend.h2d_stream = stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        backend.empty_host(8 * KIB)
    backend.sync_copies()
    stream.synchronize.assert_not_called()


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_an_error_is_cleared_by_a_kernel_that_goes_through(monkeypatch, num_failures):
    launched = []

    def fill(_):
        launched.append(1)
        if len(launched) <= num_failures:
            raise RuntimeError("CUDA error: part or all of the requested memory range is mapped")

    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(fill_=fill))
    cuda._clear_last_error()
    assert len(launched) == num_failures + 1


def test_a_device_says_what_it_is_and_an_old_torch_not_where(monkeypatch):
    properties = SimpleNamespace(name="GPU", pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda.visible_devices() == ("GPU",)
    assert cuda._pci_address(0) == "0001:dc:02.0"
    del properties.pci_domain_id
    assert cuda._pci_address(0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.visible_devices() == ()


class Bindings:
    """Stands in for ``cuda.bindings.runtime``; copies at once."""

    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815 - CUDA's name
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="in stream order")  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem="same address")  # noqa: N815

    def __init__(self):
        self.same_address, self.error = (0, 1), 0
        self.calls = []

    def cudaDeviceGetAttribute(self, attribute, index):  # noqa: N802 - CUDA's name
        assert (attribute, index) == ("same address", 3)
        return self.same_address

    def cudaMemcpyBatchAsync(  # noqa: N802 - CUDA's name
        self, destinations, sources, sizes, count, attributes, firsts, num_attributes, stream
    ):
        assert len(destinations) == len(sources) == len(sizes) == count
        assert (attributes[0].srcAccessOrder, firsts, num_attributes) == ("in stream order", [0], 1)
        self.calls.append((count, stream))
        if not self.error:
            for each in zip(destinations, sources, sizes, strict=True):
                ctypes.memmove(*each)
        return (self.error,)


@pytest.fixture
def bindings(monkeypatch):
    bindings = Bindings()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", bindings)
    return bindings


@pytest.fixture
def copying(backend, bindings, monkeypatch):
    """Return a function that copies tensors and says how many of them one by one."""
    backend._copy_many, backend._nvtx = cuda._find_copy_many(3), False
    backend.record = backend.compute_stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)

    def copy(sources, handle=77):
        targets = [torch.empty_like(source) for source in sources]
        with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as each:
            pairs = list(zip(targets, sources, strict=True))
            backend.copy(pairs, SimpleNamespace(cuda_stream=handle), "label")
        assert all(map(torch.equal, targets, sources))
        return sum(len(call.args[0]) for call in each.call_args_list)

    return copy


SEVERAL = [torch.arange(5), torch.rand(3, 4), torch.rand(64).view(8, 8)[2:4]]


def test_several_copies_are_one_call_into_the_driver(copying, bindings):
    assert copying(SEVERAL) == 0
    assert copying(SEVERAL[:1]) == 1, "it may be of memory that is not page-locked"
    assert bindings.calls == [(3, 77)]


def test_a_captured_graph_and_the_legacy_stream_take_copies_one_by_one(
    copying, bindings, monkeypatch
):
    assert copying(SEVERAL, handle=0) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert copying(SEVERAL) == 3
    assert bindings.calls == []


def test_what_the_driver_refuses_once_is_copied_one_by_one_from_then_on(copying, bindings):
    bindings.error = 801
    assert copying(SEVERAL) == 3
    assert copying(SEVERAL) == 3
    assert bindings.calls == [(3, 77)]


@pytest.mark.parametrize("answer", [(0, 0), (1, None)])
def test_where_the_device_has_other_addresses_nothing_is_copied_at_once(bindings, answer):
    assert cuda._find_copy_many(3) is not None
    bindings.same_address = answer
    assert cuda._find_copy_many(3) is None


def test_without_bindings_or_with_older_ones_nothing_is_copied_at_once(bindings, monkeypatch):
    monkeypatch.delattr(Bindings, "cudaMemcpyBatchAsync")
    assert cuda._find_copy_many(3) is None
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert cuda._find_copy_many(3) is None


def test_memory_is_that_of_all_pools_of_the_backends_own_device(backend, monkeypatch):
    def stats(device):
        assert device == backend.device
        pools = {"small_pool": {"current": 1, "peak": 2}, "large_pool": {"current": 9, "peak": 18}}
        return {
            "allocated_bytes": pools | {"all": {"current": 10, "peak": 20}},
            "reserved_bytes": pools | {"all": {"current": 30, "peak": 40}},
            "num_ooms": 5,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    assert backend.memory() == DeviceMemory(10, 30, 20, 5)
    # Before anything was allocated.
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert backend.memory() == DeviceMemory()
