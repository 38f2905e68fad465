"""A device made of CPU memory, built to expose a missing wait.

A compute stream is the host program itself: its work is done when it returns. The two copy
streams are queues, run by the configured timing or when something waits for them. The same calls
with the same seed do the same copies at the same moments; hazards and virtual times depend on the
calls and the addresses, never on the timing (but `is_done` that says so orders what comes later).
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, TypeAlias

import torch

from megatron_offload.backends.base import Backend, Pair, Wait
from megatron_offload.backends.hazards import Access, Hazard, Shadow
from megatron_offload.config import SimulatedConfig
from megatron_offload.errors import HazardError

_POISON = 0xFF
_HERE = contextlib.nullcontext()

_INDEX = {"compute": 0, "d2h": 1, "h2d": 2, "side": 3}

Clock: TypeAlias = tuple[int, ...]
"""By stream, the number of its last access that is ordered before what has this clock."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEvent:
    """A point in a simulated stream."""

    clock: Clock
    time_us: float
    """Virtual time at which the work before the event has finished."""


class SimulatedStream:
    """A queue of copies, with its vector clock and its virtual time."""

    def __init__(
        self, name: str, backend: SimulatedBackend, is_lazy: bool = False, us_per_byte: float = 0.0
    ) -> None:
        self.name = name
        self._backend = weakref.proxy(backend)  # which holds it: no circle to be collected
        self.time_us = 0.0
        self._index = _INDEX[name]
        self._is_lazy = is_lazy
        self._us_per_byte = us_per_byte
        # Copies that haven't run, with the clock behind them: what has to run first, and they.
        self._queue: deque[tuple[Clock, Sequence[Pair]]] = deque()
        self._clock: Clock = (0,) * len(_INDEX)

    def merge(self, clock: Clock) -> None:
        """Order all later work after what ``clock`` covers."""
        self._clock = tuple(map(max, self._clock, clock))

    def tick(self) -> int:
        """Do something; return its number, which is higher than all before of any stream."""
        clock = list(self._clock)
        clock[self._index] = number = next(self._backend.numbers)
        self._clock = tuple(clock)
        return number

    def is_behind(self, clock: Clock) -> bool:
        """Whether something that ``clock`` covers hasn't run."""
        return bool(self._queue) and self._queue[0][0][self._index] <= clock[self._index]

    # As a CUDA stream's methods do.

    def record_event(self) -> SimulatedEvent:
        return self._backend.record(self)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._backend.order(self, event)


class SimulatedBackend(Backend):
    """Streams, events, copies and memory of a device that is not there.

    Args:
        config: copy timing, seed, virtual bandwidths, and which checks are on.

    Raises:
        HazardError: by any call, at an access that no wait orders.
    """

    name = "simulated"
    d2h_stream: SimulatedStream
    h2d_stream: SimulatedStream

    def __init__(self, config: SimulatedConfig) -> None:
        timing = config.copy_timing
        self._compute = SimulatedStream("compute", self)
        self.side_stream = SimulatedStream("side", self)
        """Another that a program may compute on, with memory of its own."""
        self._readers: dict[int, set[SimulatedStream]] = {}

        def copy_stream(name: str, gbps: float) -> SimulatedStream:
            is_lazy = timing in ("late", "random") or f"late_{name}" in timing
            return SimulatedStream(name, self, is_lazy, us_per_byte=1e-3 / gbps)

        self.d2h_stream = copy_stream("d2h", config.d2h_gbps)
        self.h2d_stream = copy_stream("h2d", config.h2d_gbps)
        self._rng = random.Random(config.seed) if timing == "random" else None  # noqa: S311
        # Each seed also draws how lazy each stream is, so that the seeds reach the extremes too.
        self._laziness = [0.0, *(self._rng.random() for _ in range(2))] if self._rng else []
        self._poison = config.poison
        self._check = config.check_hazards
        self.observes = self._poison or self._check
        self.numbers = count(1)
        self._device = Shadow()
        self._host = Shadow()
        self.stall_us: dict[Wait, float] = dict.fromkeys(Wait, 0.0)
        """Virtual time that the compute stream has lost in each wait."""

    # What tests and benchmarks ask.

    def advance_compute(self, duration_us: float) -> None:
        """Let the compute stream work for ``duration_us`` of virtual time."""
        self._compute.time_us += duration_us

    # The contract.

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested

    def compute_stream(self) -> SimulatedStream:
        return self._compute

    def computing_on(self, stream: SimulatedStream) -> contextlib.AbstractContextManager[None]:
        return _HERE if stream is self.compute_stream() else self._computing_on(stream)

    @contextlib.contextmanager
    def _computing_on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._compute = self._compute, stream
        try:
            yield
        finally:
            self._compute = before

    def read_on(self, stream: SimulatedStream, tensor: torch.Tensor) -> None:
        if self._check:
            self._readers.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream)

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent(stream._clock, stream.time_us)
        self._run_some()
        return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, why: Wait) -> None:
        """Make later work on ``stream`` run after ``event``.

        The compute stream, and a copy stream that runs at once, force the event here and now.
        """
        if stream is self._compute and event.time_us > stream.time_us:
            self.stall_us[why] += event.time_us - stream.time_us
        self.order(stream, event)

    def order(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Do what `wait` does for a wait that is none of the engine's own."""
        stream.merge(event.clock)
        stream.time_us = max(stream.time_us, event.time_us)
        if not stream._is_lazy:
            self._run_to(event.clock)
        self._run_some()

    def copy(self, pairs: Sequence[Pair], stream: SimulatedStream, label: str) -> SimulatedEvent:
        memories = self._device, self._host
        read, written = memories[::-1] if stream is self.h2d_stream else memories
        for destination, source in pairs if self._check else ():
            self._access(read, source, stream, False, label)
            self._access(written, destination, stream, True, label)
        stream.tick()
        destinations, sources = zip(*pairs, strict=True)
        num_bytes = sum([destination.nbytes for destination in destinations])
        if stream._is_lazy:
            # The engine may empty the source's tensor, not its storage, before the copy runs.
            queued = [(to, source.detach()) for to, source in pairs]
            stream._queue.append((stream._clock, queued))
        else:
            torch._foreach_copy_(list(map(_bytes, destinations)), list(map(_bytes, sources)))
        stream.time_us += num_bytes * stream._us_per_byte
        self._run_some()
        return self.record(stream)

    def is_done(self, event: SimulatedEvent) -> bool:
        self._run_some()
        if any(stream.is_behind(event.clock) for stream in (self.d2h_stream, self.h2d_stream)):
            return False
        self._order_host_after(event.clock)  # it knows, so all that it queues comes later
        return True

    def sync_copies(self) -> None:
        for stream in (self.d2h_stream, self.h2d_stream):
            self._run_to(stream._clock)
            self._order_host_after(stream._clock)
            self._compute.time_us = max(self._compute.time_us, stream.time_us)

    def timestamp(self, stream: SimulatedStream) -> float:
        return stream.time_us

    def host_us(self) -> float:
        return 0.0  # virtual time knows no host that it would wait for

    def empty_device_like(self, host: torch.Tensor) -> torch.Tensor:
        region = torch.empty_like(host)
        if self._poison:
            _bytes(region).fill_(_POISON)
        if self._check:  # as used by the compute stream up to now (W6)
            label, home = f"fresh memory of {region.nbytes}", self._compute.name
            self._access(self._device, region, self._compute, True, label, home)
        self._run_some()
        return region

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        region = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if self._poison:
            region.fill_(_POISON)
        if self._check and num_bytes > 0:
            start = region.data_ptr()
            self._host.replace(start, start + num_bytes, None)
        return region

    def note_produced(self, region: torch.Tensor, label: str) -> None:
        # It lies in the past, so it is no hazard: the same bytes may have been noted, and may be
        # under way to the host, before. What is still unordered remains beside it.
        home = self._compute.name
        self._access(self._device, region, self._compute, True, label, home, is_past=True)
        self._run_some()

    def note_consumed(self, region: torch.Tensor, label: str) -> None:
        self._access(self._device, region, self._compute, False, label)
        self._run_some()

    def note_freed(self, region: torch.Tensor, label: str, *, sole_owner: bool) -> None:
        # The next user writes to it; with a sole owner that happens now, as poison.
        memory = region.untyped_storage().data_ptr()
        for reader in self._readers.get(memory, ()):
            if reader is not self._compute:
                self.order(self._compute, self.record(reader))
        if region.untyped_storage().resizable():  # else it isn't torch's, which frees nothing
            self._access(self._device, region, self._compute, True, f"after free of {label}")
            if self._poison and sole_owner:
                _bytes(region).fill_(_POISON)
        self._readers.pop(memory, None)  # last: a call that is cut short comes again
        self._run_some()

    # When queued work runs.

    def _run_to(self, clock: Clock) -> None:
        """Run the copies that a clock covers, in the order in which they were queued."""
        streams = self.d2h_stream, self.h2d_stream
        while behind := [stream for stream in streams if stream.is_behind(clock)]:
            first = min(behind, key=lambda stream: stream._queue[0][0][stream._index])
            _, pairs = first._queue.popleft()  # first: a copy that fails does so once
            for pair in pairs:
                _copy(*pair)

    def _run_some(self) -> None:
        """Let the seed decide how much of each queue runs now."""
        rng = self._rng
        for stream in (self.d2h_stream, self.h2d_stream):
            if rng and stream._queue and rng.random() >= self._laziness[stream._index]:
                clock, _ = rng.choice(stream._queue)
                self._run_to(clock)

    # Which wait is missing.

    def _access(
        self,
        used: Shadow,
        region: torch.Tensor,
        stream: SimulatedStream,
        writes: bool,
        label: str,
        home: str = "",
        *,
        is_past: bool = False,
    ) -> None:
        """Check an access against all earlier ones of the same bytes and put it on record."""
        if not self._check or region.nbytes == 0:
            return
        start = region.data_ptr()
        end = start + region.nbytes
        earlier_uses = used.earlier_uses(start, end)
        if not home:  # that of who has it
            home = earlier_uses[-1].home if earlier_uses else self._compute.name
        unordered = [
            earlier
            for earlier in earlier_uses
            if (writes or earlier.writes)
            and earlier.stream != stream.name
            and earlier.home == home
            and stream._clock[_INDEX[earlier.stream]] < earlier.order
        ]
        access = Access(stream.tick(), stream.name, writes, label, home)
        found: dict[Wait, Hazard] = {}
        for earlier in () if is_past else unordered:
            missing = self._missing_wait(used is self._host, earlier, access)
            found.setdefault(missing, Hazard(missing, earlier, access))
        for hazard in found.values():
            self.report(hazard)
        replaces = writes and not (is_past and unordered)
        (used.replace if replaces else used.add)(start, end, access)

    def report(self, hazard: Hazard) -> None:
        """Raise what was found; tests collect it."""
        raise HazardError(str(hazard))

    def _missing_wait(self, on_host: bool, earlier: Access, later: Access) -> Wait:
        """Name the wait that would have ordered two accesses."""
        if on_host:
            return Wait.W3 if earlier.stream == "d2h" else Wait.W5
        if earlier.stream in ("compute", "side"):
            return Wait.W1 if later.stream == "d2h" else Wait.W6
        release = Wait.W2 if earlier.stream == "d2h" else Wait.W4
        if later.stream in ("compute", "side"):
            return release
        # From one copy stream to the other the order leads through the compute stream.
        if self._compute._clock[_INDEX[earlier.stream]] < earlier.order:
            return release
        return Wait.W1 if later.stream == "d2h" else Wait.W6

    def _order_host_after(self, clock: tuple[int, ...]) -> None:
        for stream in (self._compute, self.side_stream, self.d2h_stream, self.h2d_stream):
            stream.merge(clock)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes; what a device would read where the source's storage was emptied meanwhile."""
    start = source.storage_offset() * source.itemsize
    if source.untyped_storage().nbytes() >= start + source.nbytes:
        _bytes(destination).copy_(_bytes(source))
    else:
        _bytes(destination).fill_(_POISON)


def _bytes(region: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes, whatever its dtype can do; no version counts a change."""
    first = region.storage_offset() * region.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(region.untyped_storage(), first, (region.nbytes,), (1,))


class HostTimedBackend(SimulatedBackend):
    """A simulated device for timelines of real programs: compute takes as long as it really does.

    Between two calls of the backend the compute stream has worked for as long as the host took.
    What the calls themselves take (poison, the search for hazards) is no compute.
    """

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config)
        self._depth = 0
        self._left_at_s = perf_counter()


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: HostTimedBackend, *args: Any, **kw: Any) -> Any:
        if self._depth == 0:
            self.advance_compute(1e6 * (perf_counter() - self._left_at_s))
        self._depth += 1
        try:
            return method(self, *args, **kw)
        finally:
            self._depth -= 1
            self._left_at_s = perf_counter()

    return call


for _name, _method in vars(SimulatedBackend).items():
    if _name in vars(Backend) and callable(_method) and _name[0] != "_":
        setattr(HostTimedBackend, _name, _timed(_method))
