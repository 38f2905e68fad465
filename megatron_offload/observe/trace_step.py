"""A timeline of what one step's streams do, and of the bytes that it holds.

Nothing blocks the host while it is recorded: times are read when the block is left.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import (
    HELD_BYTES,
    HOST_BYTES,
    INFLIGHT_BYTES,
    LIVE_BYTES,
    PREFETCHED_BYTES,
    STREAMS,
    Counter,
    Span,
    StepTrace,
)
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction, Observer


@contextmanager
def trace_step(manager: PipelineOffloadManager, rank: int = 0) -> Iterator[StepTrace]:
    """Trace what runs inside; meant for one step, its ``reset`` included, after the first few.

    The trace of this ``rank`` is filled when the block is left, unless by an exception.
    """
    trace = StepTrace(rank)
    tracer = _Tracer(manager)
    with manager.observed_by(tracer):
        yield trace
        tracer.finish(trace)


class _Stretch(NamedTuple):
    """A span whose times are still to be read."""

    stream: str
    kind: str
    label: str
    start: Any
    end: Any
    num_bytes: int = 0
    wait: str = ""


class _Tracer(Observer):
    """What the streams did between the points that the program has passed."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._backend = manager.backend
        self._host_pool = manager.host_pool
        self._budget = manager.budget
        # Groups that the program is in, innermost last.
        self._open: list[tuple[str, OffloadGroup]] = []
        self._live_bytes: dict[GroupKey, int] = {}
        self._inflight: Tally[OffloadGroup] = Tally()
        self._origin = self._time = self._since = self._now()
        self._kind, self._label = "other", ""  # what compute does since then
        self._outer_kinds: list[str] = []
        self._stretches: list[_Stretch] = []
        self._samples: list[tuple[str, Any, float]] = []
        self._last_values: dict[str, float] = {}
        self._sample()

    # Boundaries

    def group_starts(self, group: OffloadGroup) -> None:
        self._leave_backwards(lambda left: True)
        self._open.append(("forward", group))
        self._mark()

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        self._close("forward", group)
        if group.key not in self._live_bytes:  # a commit that is put off comes twice
            num_bytes = sum(block.num_bytes for block in group.blocks() if block.flight is None)
            self._live_bytes[group.key] = num_bytes

    def group_committed(self, group: OffloadGroup) -> None:
        remade_bytes = sum(unit.num_bytes for unit in group.remade if unit.is_remade)
        self._live_bytes[group.key] -= remade_bytes
        self._sample()

    def backward_enters(self, group: OffloadGroup) -> None:
        self._leave_backwards(lambda left: not surrounds(left, group))
        self._open.append(("backward", group))
        self._mark()

    def backward_leaves(self, group: OffloadGroup) -> None:
        self._close("backward", group)
        self._live_bytes.pop(group.key, None)

    def backward_entered(self, group: OffloadGroup) -> None:
        self._sample()

    backward_left = backward_entered

    def _leave_backwards(self, is_left: Callable[[OffloadGroup], bool]) -> None:
        """Close groups whose start has no backward of its own, for want of a gradient."""
        for kind, group in list(self._open):
            if kind == "backward" and is_left(group):
                self._open.remove((kind, group))
                self._live_bytes.pop(group.key, None)

    def _close(self, kind: str, group: OffloadGroup) -> None:
        if (kind, group) in self._open:
            self._open.remove((kind, group))
            self._mark()

    def _mark(self) -> None:
        self._pass(self._now())
        kind, group = self._open[-1] if self._open else ("other", None)
        self._kind, self._label = kind, group.label if group else ""

    def _pass(self, time: Any) -> None:
        self._stretches.append(_Stretch("compute", self._kind, self._label, self._since, time))
        self._since = time

    # Copies, waits, and what is made again

    def remake_starts(self, block: Block) -> None:
        self._pass(self._now())
        self._outer_kinds.append(self._kind)
        self._kind = "remake"

    def remade(self, block: Block, made: torch.Tensor) -> None:
        self._pass(self._now())
        self._kind = self._outer_kinds.pop()

    def copy_starts(self, direction: Direction) -> None:
        if direction == "h2d":  # else the host's memory is taken, and nothing is in it yet
            self._sample()
        self._time = self._timestamp(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        num_bytes = sum(destination.nbytes for destination, _ in pairs)
        end = self._timestamp(direction)
        self._stretches.append(
            _Stretch(direction, direction, group.label, self._time, end, num_bytes)
        )
        if direction == "d2h":
            self._inflight[group] += num_bytes

    def wait_starts(self) -> None:
        self._time = self._now()
        self._sample(self._time)

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        self._pass(self._time)
        self._since = after = self._now()
        self._stretches.append(
            _Stretch("compute", "stall", self._label, self._time, after, wait=why.name)
        )
        if why is Wait.W2:
            self._inflight.pop(group, None)
        self._sample(after)

    def _timestamp(self, direction: Direction) -> Any:
        backend = self._backend
        stream = backend.d2h_stream if direction == "d2h" else backend.h2d_stream
        return backend.timestamp(stream)

    def _now(self) -> Any:
        return self._backend.timestamp(self._backend.compute_stream())

    # Counters

    def _sample(self, time: Any = None) -> None:
        """Note the counters that have changed, at ``time`` or where the compute stream is now."""
        on_host, in_flight = self._host_pool.in_use.total_bytes, self._inflight.total()
        live_bytes = sum(self._live_bytes.values())
        values: dict[str, float] = {
            INFLIGHT_BYTES: in_flight,
            HOST_BYTES: on_host,
            PREFETCHED_BYTES: self._budget.held_bytes,
            LIVE_BYTES: live_bytes,
            # What lies on the host and in flight is held twice; what came back before its release
            # is in flight alone.
            HELD_BYTES: min(max(live_bytes - on_host + in_flight, 0), live_bytes),
        }
        changed = [name for name in values if values[name] != self._last_values.get(name)]
        if changed:
            time = time if time is not None else self._now()
            self._samples += [(name, time, values[name]) for name in changed]
            self._last_values = values

    # The trace

    def finish(self, trace: StepTrace) -> None:
        """Wait for what was recorded and fill a trace with it; spans of a stream don't overlap."""
        self._mark()
        times = [time for one in self._stretches for time in (one.start, one.end)]
        times += [time for _, time, _ in self._samples]
        # The record keeps the keys' objects alive.
        at_us = {id(time): self._backend.sync_elapsed_us(self._origin, time) for time in times}
        first_us = min(0.0, *at_us.values())  # a copy stream may have been ahead at the start
        reached_us = dict.fromkeys(STREAMS, 0.0)
        for stream, kind, label, start, end, num_bytes, wait in self._stretches:
            start_us = max(reached_us[stream], at_us[id(start)] - first_us)
            reached_us[stream] = max(start_us, at_us[id(end)] - first_us)
            duration_us = reached_us[stream] - start_us
            if duration_us > 0 or num_bytes or wait:
                trace.spans.append(
                    Span(stream, kind, label, start_us, duration_us, num_bytes, wait)
                )
        trace.counters = [
            Counter(name, at_us[id(time)] - first_us, value) for name, time, value in self._samples
        ]


def surrounds(outer: OffloadGroup, inner: OffloadGroup) -> bool:
    """Whether a group that backward is in can still be open when it enters ``inner``.

    Any other was left without a word, for want of a gradient of its start.
    """
    return outer.key.chunk == inner.key.chunk and outer.key.order < inner.key.order
