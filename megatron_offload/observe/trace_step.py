"""A timeline of what one step's streams do, and of the bytes that it holds.

Nothing blocks the host while it is recorded: times are read when the block is left.
"""

from __future__ import annotations

import itertools
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import STREAMS, ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.block_state import SAVED
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction, Observer


class _Turn(NamedTuple):
    """What the compute stream does from a time on."""

    time: Any
    kind: str
    """As `Span.kind`."""
    label: str
    """Of a group, or of what is recomputed; empty where the program is in none."""
    wait: str = ""


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


class _Tracer(Observer):
    """Events of the compute stream at group boundaries, waits and recompute; times of all copies.

    Of a group whose start needs no gradient no event says that backward leaves it: the next
    boundary outside the group counts as its end.
    """

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._manager, self._backend = manager, manager.backend
        self._turns: list[_Turn] = []
        self._recomputing: list[str] = []
        self._copies: list[tuple[Direction, str, Any, Any, int]] = []
        """Stream, group, when they began and ended, bytes."""
        self._open: list[tuple[str, OffloadGroup]] = []
        """The passes and groups that the program is in, innermost last."""
        self._live_bytes: dict[GroupKey, int] = {}
        self._inflight: Tally[OffloadGroup] = Tally()
        self._samples: list[tuple[str, Any, float]] = []
        self._last_values: dict[str, float] = {}
        self._turn()
        self._sample()

    def _turn(self) -> None:
        """Note what the compute stream does from now on."""
        kind, label = self._place()
        if self._recomputing:
            kind, label = "recompute", self._recomputing[-1]
        self._turns.append(_Turn(self._now(), kind, label))

    def _place(self) -> tuple[str, str]:
        kind, group = self._open[-1] if self._open else ("other", None)
        return kind, "" if group is None else group.label

    def _now(self) -> Any:
        return self._backend.timestamp(self._backend.compute_stream())

    def _pass_boundary(self) -> None:
        self._recomputing.clear()  # where an exception has ended it
        self._turn()

    def group_starts(self, group: OffloadGroup) -> None:
        self._leave_backwards()
        self._open.append(("forward", group))
        self._pass_boundary()

    def group_commits(self, group: OffloadGroup) -> None:
        if ("forward", group) in self._open:  # a commit that is put off comes twice
            self._open.remove(("forward", group))
            self._pass_boundary()
        num_bytes = sum(block.num_bytes for block in group.blocks() if block.state is SAVED)
        self._live_bytes[group.key] = num_bytes

    def backward_enters(self, group: OffloadGroup) -> None:
        self._leave_backwards(inner=group)
        self._open.append(("backward", group))
        self._pass_boundary()

    def backward_leaves(self, group: OffloadGroup) -> None:
        if ("backward", group) in self._open:  # else backward began inside it
            self._open.remove(("backward", group))
            self._pass_boundary()
            self._live_bytes.pop(group.key, None)

    def boundary_passed(self, group: OffloadGroup) -> None:
        if group.key in self._live_bytes:  # it was dropped at the commit, till backward enters
            self._live_bytes[group.key] -= sum(group.dropped_bytes.values())
        self._sample()

    def _leave_backwards(self, inner: OffloadGroup | None = None) -> None:
        """Leave the groups that backward is in, but for those around ``inner``."""
        for kind, group in list(self._open):
            is_around = inner is not None and (
                group.key.chunk == inner.key.chunk and group.key.order < inner.key.order
            )
            if kind == "backward" and not is_around:
                self.backward_leaves(group)

    def recompute_starts(self, label: str) -> None:
        self._recomputing.append(label)
        self._turn()

    def recomputed(self, made: object) -> None:
        del self._recomputing[-1:]  # none where a pass has begun meanwhile
        self._turn()

    def copy_starts(self, direction: Direction) -> None:
        if direction == "h2d":  # else the host's memory is taken, and nothing is in it yet
            self._sample()
        self._copies_since = self._now_on(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        num_bytes = sum(destination.nbytes for destination, _ in pairs)
        since, end = self._copies_since, self._now_on(direction)
        self._copies.append((direction, group.label, since, end, num_bytes))
        if direction == "d2h":
            self._inflight[group] += num_bytes

    def _now_on(self, direction: Direction) -> Any:
        backend = self._backend
        return backend.timestamp(backend.d2h_stream if direction == "d2h" else backend.h2d_stream)

    def wait_starts(self) -> None:
        self._turns.append(_Turn(self._now(), "stall", self._place()[1]))
        self._sample(self._turns[-1].time)

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        self._turns[-1] = self._turns[-1]._replace(wait=why.name)
        self._turn()
        if why is Wait.W2:
            self._inflight.pop(group, None)
        self._sample(self._turns[-1].time)

    def _sample(self, time: Any = None) -> None:
        """Note the counters that have changed, at ``time`` or where the compute stream is now."""
        on_host, in_flight = self._manager.host_pool.stats.in_use_bytes, self._inflight.total()
        live_bytes = sum(self._live_bytes.values())
        values: dict[str, float] = {
            ByteCount.INFLIGHT: in_flight,
            ByteCount.HOST: on_host,
            ByteCount.PREFETCHED: self._manager.budget.held_bytes,
            ByteCount.LIVE: live_bytes,
            # What lies on the host and in flight is held twice; what was reloaded before its
            # release is in flight alone.
            ByteCount.HELD: min(max(live_bytes - on_host + in_flight, 0), live_bytes),
        }
        changed = [name for name in values if values[name] != self._last_values.get(name)]
        if changed:
            time = time if time is not None else self._now()
            self._samples += [(name, time, values[name]) for name in changed]
            self._last_values = values

    def finish(self, trace: StepTrace) -> None:
        """Wait for what was recorded and fill a trace with it; spans of a stream don't overlap."""
        self._turn()
        origin = self._turns[0].time
        times = [turn.time for turn in self._turns] + [time for _, time, _ in self._samples]
        times += [time for _, _, *both, _ in self._copies for time in both]
        # The record keeps the keys' objects alive.
        at_us = {id(time): self._backend.sync_elapsed_us(origin, time) for time in times}
        first_us = min(at_us.values())  # a copy stream may have been ahead at the start
        reached_us = dict.fromkeys(STREAMS, 0.0)

        def add(stream: str, start: Any, end: Any, kind: str, label: str, **more: Any) -> None:
            start_us = max(reached_us[stream], at_us[id(start)] - first_us)
            reached_us[stream] = max(start_us, at_us[id(end)] - first_us)
            span = Span(stream, kind, label, start_us, reached_us[stream] - start_us, **more)
            if span.duration_us > 0 or more.get("num_bytes") or more.get("wait"):
                trace.spans.append(span)

        for turn, until in itertools.pairwise(self._turns):
            add("compute", turn.time, until.time, turn.kind, turn.label, wait=turn.wait)
        for stream, label, start, end, num_bytes in self._copies:
            add(stream, start, end, stream, label, num_bytes=num_bytes)
        trace.counters = [
            Counter(name, at_us[id(time)] - first_us, value) for name, time, value in self._samples
        ]
