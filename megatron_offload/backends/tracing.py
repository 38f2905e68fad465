"""A backend around another one that notes what the streams do, and when.

Owns the marks that become a `StepTrace`. Must not know groups or pools: what the compute stream
works on, it is told by `TracingBackend.mark`. Nothing is changed on the way through: the same
streams, events and copies in the same order.

Invariants: nothing blocks the host while it records, times are read in `TracingBackend.finish`
alone; spans of one stream don't overlap. Read next: `megatron_offload.observe.trace_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from megatron_offload.backends.base import (
    Backend,
    DeviceInfo,
    DeviceMemory,
    Event,
    Pair,
    Stream,
    Wait,
)
from megatron_offload.core.trace import INFLIGHT_BYTES, Counter, Span, StepTrace

__all__ = ["TracingBackend"]


class _Copy(NamedTuple):
    """One call of `Backend.copy`."""

    stream: str
    label: str
    num_bytes: int
    start: Any
    end: Any


class _Mark(NamedTuple):
    """What the compute stream does from here on."""

    time: Any
    kind: str
    label: str
    wait: str


class TracingBackend(Backend):
    """Everything that ``inner`` does, on record.

    It grows with every call until `finish` takes the record, so it is made for a step at a time.

    Args:
        inner: what really copies.
        counters: further numbers of bytes to sample, by name.
    """

    observes = True
    """Always, so that copies carry the full name of their group."""

    def __init__(
        self, inner: Backend, *, counters: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.d2h_stream = inner.d2h_stream
        self.h2d_stream = inner.h2d_stream
        self.counters = counters
        # Bytes of each offload whose source is still held, by the event behind it.
        self._held: dict[int, tuple[Event, int]] = {}
        self._unrecorded_bytes = 0
        self._inflight_bytes = 0
        self.restart()

    # The record

    def restart(self) -> None:
        """Drop what was recorded and begin at time zero."""
        self._origin = self._now()
        self._copies: list[_Copy] = []
        self._marks = [_Mark(self._origin, "other", "", "")]
        self._samples: list[tuple[str, Any, float]] = []
        self._last_values: dict[str, float] = {}
        self.sample()

    def mark(self, kind: str, label: str) -> None:
        """Note what the compute stream works on from here on.

        Args:
            kind: ``forward``, ``backward`` or ``other``.
            label: the group's name; empty outside any.
        """
        self._marks.append(_Mark(self._now(), kind, label, ""))

    def sample(self, time: Any = None) -> None:
        """Note the counters that have changed, at the compute stream's present point.

        Args:
            time: a point of the compute stream that was taken already.
        """
        values: dict[str, float] = {INFLIGHT_BYTES: self._inflight_bytes}
        if self.counters is not None:
            values.update(self.counters())
        changed = [name for name in values if values[name] != self._last_values.get(name)]
        if not changed:
            return
        time = time if time is not None else self._now()
        self._samples += [(name, time, values[name]) for name in changed]
        self._last_values = values

    @property
    def inflight_bytes(self) -> int:
        """Bytes whose copy to the host is issued and whose release has not come by."""
        return self._inflight_bytes

    def finish(self, rank: int = 0) -> StepTrace:
        """Wait for what was recorded, read its times, and begin a new record.

        Args:
            rank: whose trace it is.
        """
        end = self._now()
        marks, copies, samples = self._marks, self._copies, self._samples
        at_us = self._read_times(
            [end, *(mark.time for mark in marks), *(sample[1] for sample in samples)]
            + [time for copy in copies for time in (copy.start, copy.end)]
        )
        trace = StepTrace(rank)
        ends = [mark.time for mark in marks[1:]] + [end]
        reached_us = 0.0
        for mark, until in zip(marks, ends, strict=True):
            start_us = max(reached_us, at_us[id(mark.time)])
            reached_us = max(start_us, at_us[id(until)])
            if reached_us > start_us or mark.kind == "stall":
                duration_us = reached_us - start_us
                trace.spans.append(
                    Span("compute", mark.kind, mark.label, start_us, duration_us, 0, mark.wait)
                )
        reached = {"d2h": 0.0, "h2d": 0.0}
        for copy in copies:
            start_us = max(reached[copy.stream], at_us[id(copy.start)])
            reached[copy.stream] = end_us = max(start_us, at_us[id(copy.end)])
            trace.spans.append(
                Span(
                    copy.stream,
                    copy.stream,
                    copy.label,
                    start_us,
                    end_us - start_us,
                    copy.num_bytes,
                )
            )
        trace.counters = [Counter(name, at_us[id(time)], value) for name, time, value in samples]
        self.restart()
        return trace

    def _now(self) -> Any:
        return self.inner.timestamp(self.inner.compute_stream())

    def _read_times(self, times: Sequence[Any]) -> dict[int, float]:
        """Return each time since the first of all; the record keeps the keys' objects alive."""
        at_us = {id(time): self.inner.sync_elapsed_us(self._origin, time) for time in times}
        first_us = min(0.0, *at_us.values())  # a copy stream may have been ahead at the start
        return {key: value - first_us for key, value in at_us.items()}

    # The contract

    def describe(self) -> DeviceInfo | None:
        """Return what the device says of itself; None where there is no real one."""
        return self.inner.describe()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lives in the inner backend's device memory."""
        return self.inner.owns(tensor)

    def compute_stream(self) -> Stream:
        """Return the stream that the calling program computes on now."""
        return self.inner.compute_stream()

    def compute_stream_key(self) -> Hashable:
        """Return what tells the present compute stream from others."""
        return self.inner.compute_stream_key()

    def record(self, stream: Stream) -> Event:
        """Return a new event; behind an offload, note whose bytes it stands for."""
        event = self.inner.record(stream)
        if self._unrecorded_bytes and stream is self.d2h_stream:
            self._held[id(event)] = (event, self._unrecorded_bytes)
            self._inflight_bytes += self._unrecorded_bytes
            self._unrecorded_bytes = 0
        return event

    def wait(self, stream: Stream, event: Event, why: Wait) -> None:
        """Make later work on ``stream`` run after ``event``; note how long compute stands."""
        if stream is self.d2h_stream or stream is self.h2d_stream:
            self.inner.wait(stream, event, why)
            return
        before = self.inner.timestamp(stream)
        self.sample(before)
        self.inner.wait(stream, event, why)
        after = self.inner.timestamp(stream)
        current = self._marks[-1]
        self._marks.append(_Mark(before, "stall", current.label, why.name))
        self._marks.append(current._replace(time=after))
        if why is Wait.W2:
            _, num_bytes = self._held.pop(id(event), (None, 0))
            self._inflight_bytes -= num_bytes
        self.sample(after)

    def copy(self, pairs: Sequence[Pair], stream: Stream, label: str) -> None:
        """Queue copies on ``stream``, between two points whose times are read later."""
        self.sample()
        start = self.inner.timestamp(stream)
        self.inner.copy(pairs, stream, label)
        end = self.inner.timestamp(stream)
        num_bytes = sum(destination.nbytes for destination, _ in pairs)
        is_offload = stream is self.d2h_stream
        self._copies.append(_Copy("d2h" if is_offload else "h2d", label, num_bytes, start, end))
        if is_offload:
            self._unrecorded_bytes += num_bytes

    def is_done(self, event: Event) -> bool:
        """Whether the work before ``event`` has finished, without waiting."""
        return self.inner.is_done(event)

    def sync_event(self, event: Event) -> None:
        """Block the host until the work before ``event`` has finished."""
        self.inner.sync_event(event)

    def sync_copies(self) -> None:
        """Block the host until both copy streams are empty."""
        self.inner.sync_copies()

    def watch_syncs(self, report: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call ``report`` whenever the program makes the host wait for the device."""
        return self.inner.watch_syncs(report)

    def timestamp(self, stream: Stream) -> Any:
        """Return a point in ``stream`` whose time can be read later."""
        return self.inner.timestamp(stream)

    def sync_elapsed_us(self, start: Any, end: Any) -> float:
        """Block the host until both points have passed; return the time between them."""
        return self.inner.sync_elapsed_us(start, end)

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context for what the host does besides the program."""
        return self.inner.uncounted()

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory in the order of the compute stream."""
        return self.inner.empty_device(num_bytes)

    def empty_device_like(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous tensor of device memory, in the order of the compute stream."""
        return self.inner.empty_device_like(shape, dtype)

    def reserved_bytes(self) -> int | None:
        """Return the device memory that the process has taken and not handed back, if known."""
        return self.inner.reserved_bytes()

    def memory(self) -> DeviceMemory | None:
        """Return what is allocated and reserved, if known."""
        return self.inner.memory()

    def reset_memory_peaks(self) -> None:
        """Start new peaks of `memory`."""
        self.inner.reset_memory_peaks()

    def trim_device(self) -> None:
        """Hand device memory that is cached and unused back."""
        self.inner.trim_device()

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked host memory.

        Raises:
            RuntimeError: the memory can't be had or can't be pinned.
        """
        return self.inner.empty_host(num_bytes)

    def graph_stream(self) -> Stream | None:
        """Return a new stream to capture a graph on; None where there are no graphs."""
        return self.inner.graph_stream()

    def graph_event(self) -> Event | None:
        """Return a new event that orders work inside a graph with work outside; None likewise."""
        return self.inner.graph_event()

    def note_produced(self, region: torch.Tensor, label: str) -> None:
        """Hand on that the compute stream has written ``region``."""
        self.inner.note_produced(region, label)

    def note_consumed(self, region: torch.Tensor, label: str) -> None:
        """Hand on that the compute stream reads ``region`` from here on."""
        self.inner.note_consumed(region, label)

    def note_freed(self, region: torch.Tensor, label: str, *, sole_owner: bool) -> None:
        """Hand on that ``region`` may be overwritten."""
        self.inner.note_freed(region, label, sole_owner=sole_owner)
