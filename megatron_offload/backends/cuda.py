"""The contract on a CUDA device.

The compute stream is asked for at every use, and never while a copy stream is current.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from megatron_offload.backends.base import Backend, DeviceMemory, Pair, Wait
from megatron_offload.backends.host_limit import near_cpus, running_on
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import IntegrationError

_PAUSE_CYCLES = 2_000_000
"""Of the device's clock, which ticks some two thousand times in a microsecond."""

_DROP_S = 0.1
"""Between slabs that are unpinned: each holds up the launch of kernels for 15 ms."""

_HERE = contextlib.nullcontext()

_logger = logging.getLogger(__name__)


def current_index() -> int | None:
    """Return the number of the device that is current for this thread; None where there is none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def visible_devices() -> tuple[str, ...]:
    """Name the devices that this process can use; makes no context on any of them."""
    indexes = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(torch.cuda.get_device_properties(index).name for index in indexes)


class CudaBackend(Backend):
    """Streams, events, pinned memory and copies of the current CUDA device.

    Args:
        config: its ``nvtx``, ``pin_memory`` and ``copy_streams`` count. Without the last, copies go
            to the stream that is current now.
        device_index: a device to make the process's current one first; None leaves it.
    """

    name = "cuda"

    def __init__(
        self, config: OffloadConfig | None = None, device_index: int | None = None
    ) -> None:
        config = config or OffloadConfig()
        if not torch.cuda.is_available():
            raise IntegrationError(
                "backend 'cuda' needs a CUDA device and torch sees none; "
                "use backend: simulated, or auto"
            )
        if device_index is not None:
            torch.cuda.set_device(device_index)
        self._index = torch.cuda.current_device()
        self.device = torch.device("cuda", self._index)
        if config.copy_streams:
            self.d2h_stream = torch.cuda.Stream(self.device)
            self.h2d_stream = torch.cuda.Stream(self.device)
        else:
            self.d2h_stream = self.h2d_stream = torch.cuda.current_stream(self.device)
        self._nvtx = config.nvtx
        self._pin_memory, self._is_for_graphs = config.pin_memory, config.whole_step_graph
        self._copy_many = _find_copy_many(self._index) if config.pin_memory else None
        self._near_cpus = near_cpus(_pci_address(self._index))
        self._ahead = _PagesAhead()
        # Which stream is current is asked every time; only the object that stands for it is kept.
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        # A wait is for what an event stands for when it is queued, so one event does for all.
        self._now = torch.cuda.Event()

    def owns(self, tensor: torch.Tensor) -> bool:
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        return is_strided and tensor.is_cuda and tensor.get_device() == self._index

    def compute_stream(self) -> torch.cuda.Stream:
        key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self._index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        return stream

    def computing_on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return _HERE if stream is self.compute_stream() else torch.cuda.stream(stream)

    def read_on(self, stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
        tensor.record_stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event, why: Wait) -> None:
        stream.wait_event(event)

    def wait_compute(self, stream: torch.cuda.Stream, why: Wait) -> None:
        self._now.record(self.compute_stream())
        stream.wait_event(self._now)

    def copy(
        self, pairs: Sequence[Pair], stream: torch.cuda.Stream, label: str
    ) -> torch.cuda.Event:
        if self._nvtx:
            # One stream may do both.
            is_offload = stream is self.d2h_stream and not pairs[0][0].is_cuda
            torch.cuda.nvtx.range_push(f"{'offload' if is_offload else 'reload'} {label}")
        try:
            if not self._is_copied_at_once(pairs, stream):
                self._copy_each(pairs, stream)
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
        return self.record(stream)

    def _is_copied_at_once(self, pairs: Sequence[Pair], stream: torch.cuda.Stream) -> bool:
        """Queue several copies by one call into the driver; return whether it has taken them.

        It does so with no graph that is captured, nor on the legacy default stream. A single copy
        may be one of memory that isn't page-locked.
        """
        if self._copy_many is None or len(pairs) == 1:
            return False
        handle = stream.cuda_stream
        if not handle or self.is_capturing():
            return False
        error = self._copy_many(pairs, handle)
        if error:
            self._copy_many = None
            _logger.debug("copies are queued one by one: CUDA error %d", error)
        return not error

    def _copy_each(self, pairs: Sequence[Pair], stream: torch.cuda.Stream) -> None:
        before = self.compute_stream()
        torch.cuda.set_stream(stream)  # quicker than the context manager, once per group
        try:
            destinations, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(destinations, sources, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def sync_copies(self) -> None:
        if self.is_capturing():  # nothing runs
            return
        self.d2h_stream.synchronize()
        self.h2d_stream.synchronize()

    def timestamp(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event(torch.cuda.Event(enable_timing=True))

    def sync_elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def pause(self) -> None:
        torch.cuda._sleep(_PAUSE_CYCLES)

    def empty_device_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self.device)

    def capacity_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return free_bytes + torch.cuda.memory_reserved(self.device)

    def memory(self) -> DeviceMemory:
        # `memory_stats` would flatten and sort a hundred other numbers first.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not found:  # nothing was ever allocated
            return DeviceMemory()
        allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        sizes = allocated["current"], reserved["current"], allocated["peak"]
        return DeviceMemory(*sizes, found["num_ooms"])

    def trim_device(self) -> None:
        torch.cuda.empty_cache()

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory of exactly this size, page-locked unless that is switched off.

        PyTorch's own pinned allocator rounds up to a power of two, so the pages are allocated
        plainly and registered with the driver. Where the machine has several memory nodes, they
        come from the one next to the device.
        """
        if self.is_capturing():
            raise RuntimeError("a CUDA graph is captured")
        if not self._pin_memory:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        pages = self._ahead.take(num_bytes)
        with running_on(self._near_cpus):  # registering is what touches the pages first
            pages = pages or _PinnedPages(num_bytes)
            pages.pin()
        return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def prepare_host(self, num_bytes: int, number: int) -> None:
        self._ahead.is_wanted = False
        self.discard([*self._ahead.ready])
        self._ahead = _PagesAhead(num_bytes, number if self._pin_memory else 0, self._near_cpus)

    @property
    def is_host_prepared(self) -> bool:
        return self._ahead.is_done

    @property
    def num_host_prepared(self) -> int:
        return len(self._ahead.ready)

    def discard(self, memory: list[Any]) -> None:
        # To give a gigabyte back takes a tenth of a second, in which no graph may be captured in
        # any thread.
        if memory and not self._is_for_graphs:
            threading.Thread(target=_drop, args=(memory, _DROP_S), daemon=True).start()
        else:
            memory.clear()

    def graph_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def graph_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(external=True)


def _find_copy_many(index: int) -> Callable[[Sequence[Pair], int], int] | None:
    """Return what queues many copies on a stream at once, and the CUDA error of doing so.

    For small tensors, the calls into the driver are what takes the host's time, and the way from
    one copy to the next the device's. It is ``cudaMemcpyBatchAsync`` of NVIDIA's bindings, which
    PyTorch for CUDA 13 brings. None: they aren't there, or too old, or the device knows page-locked
    memory by other addresses than the host, which only single copies translate.
    """
    try:
        runtime: Any = import_module("cuda.bindings.runtime")
        attributes = [runtime.cudaMemcpyAttributes()]
        order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        same_address = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        copy = runtime.cudaMemcpyBatchAsync
        has_same_address = runtime.cudaDeviceGetAttribute(same_address, index) == (0, 1)
    except (ImportError, AttributeError):  # of CUDA before 12.8
        return None
    if not has_same_address:
        return None
    attributes[0].srcAccessOrder = order

    def copy_many(pairs: Sequence[Pair], handle: int) -> int:
        destinations = [destination.data_ptr() for destination, _ in pairs]
        sources = [source.data_ptr() for _, source in pairs]
        sizes = [source.nbytes for _, source in pairs]
        return int(copy(destinations, sources, sizes, len(sizes), attributes, [0], 1, handle)[0])

    return copy_many


def _pci_address(index: int) -> str | None:
    found: Any = torch.cuda.get_device_properties(index)
    if not hasattr(found, "pci_domain_id"):  # torch is older
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


class _PinnedPages(mmap.mmap):
    """Anonymous pages, page-locked from `pin` on for as long as anything refers to them.

    Large ones, where the system has such: while a thread touches those, no launch waits for it.
    """

    _address = 0

    def __new__(cls, num_bytes: int) -> _PinnedPages:
        try:
            pages = super().__new__(cls, -1, num_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeError(f"{num_bytes} bytes of host memory can't be had: {error}") from error
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def pin(self) -> None:
        """Register them with the driver."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _register(address, len(self))
        self._address = address

    def __del__(self) -> None:
        if self._address:
            _unregister(self._address)
        self.close()  # other threads run meanwhile, as they don't where it is deallocated


class _PagesAhead:
    """Pages that a thread touches beside the program: to pin those takes a tenth of the time."""

    def __init__(
        self, num_bytes: int = 0, number: int = 0, cpus: frozenset[int] = frozenset()
    ) -> None:
        self.is_wanted, self.is_done = True, not number
        self._num_bytes, self._cpus = num_bytes, cpus
        self.ready: deque[_PinnedPages] = deque()
        if number:
            threading.Thread(target=self._touch, args=(number,), daemon=True).start()

    def _touch(self, number: int) -> None:
        with running_on(self._cpus), contextlib.suppress(RuntimeError):  # who needs them says so
            for _ in range(number):
                pages = _PinnedPages(self._num_bytes)
                np.frombuffer(pages, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
                if not self.is_wanted:
                    break
                self.ready.append(pages)
        self.is_done = True

    def take(self, num_bytes: int) -> _PinnedPages | None:
        """Return pages of this size, if there are any."""
        return self.ready.popleft() if num_bytes == self._num_bytes and self.ready else None


def _drop(memory: list[Any], pause_s: float) -> None:
    """Let one go after the other."""
    while memory:
        memory.pop()
        time.sleep(pause_s)


def _register(address: int, num_bytes: int) -> None:
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(address, num_bytes, 0)
    if int(error) != 0:
        _clear_last_error()
        raise RuntimeError(
            f"pinning {num_bytes} bytes of host memory failed: {cudart.cudaGetErrorString(error)}"
        )


def _unregister(address: int) -> None:
    error = torch.cuda.cudart().cudaHostUnregister(address)
    if int(error) != 0:
        _clear_last_error()
        _logger.debug("unpinning host memory failed with CUDA error %d", int(error))


# CUDA keeps the error of a call that failed, and PyTorch looks for one after every kernel that it
# launches: a pin that failed, with its answer dealt with, would make the next kernel raise. PyTorch
# exposes no way to ask for that error, which is what clears it. But its own check does ask, so a
# kernel that does nothing of use is launched to run into it.
def _clear_last_error() -> None:
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device="cuda").fill_(0)
            return
