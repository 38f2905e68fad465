"""A timeline of what one step's streams do, and of the bytes that it holds.

Nothing blocks the host while it is recorded: times are read when the block is left.
"""

from __future__ import annotations

import itertools
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import STREAMS, ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction
from megatron_offload.observe.measure import Boundary, BoundaryTimer


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


class _Tracer(BoundaryTimer):
    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__(manager)
        self._live_bytes: dict[GroupKey, int] = {}
        self._inflight: Tally[OffloadGroup] = Tally()
        self._samples: list[tuple[str, Any, float]] = []
        self._last_values: dict[str, float] = {}
        self.turn()
        self._sample()

    def passed(self, boundary: Boundary, group: OffloadGroup) -> None:
        super().passed(boundary, group)
        if boundary == "done":
            self._live_bytes.pop(group.key, None)

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        super().group_commits(group, is_delayed=is_delayed)
        if group.key not in self._live_bytes:
            num_bytes = sum(block.num_bytes for block in group.blocks() if block.flight is None)
            self._live_bytes[group.key] = num_bytes

    def group_committed(self, group: OffloadGroup) -> None:
        recomputed_bytes = sum(unit.num_bytes for unit in group.recomputed if unit.is_recomputed)
        self._live_bytes[group.key] -= recomputed_bytes
        self._sample()

    def backward_entered(self, group: OffloadGroup) -> None:
        self._sample()

    backward_left = backward_entered

    def copy_starts(self, direction: Direction) -> None:
        if direction == "h2d":  # else the host's memory is taken, and nothing is in it yet
            self._sample()
        super().copy_starts(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        super().copy_issued(direction, pairs, group)
        if direction == "d2h":
            self._inflight[group] += self.copies[-1].num_bytes

    def wait_starts(self) -> None:
        super().wait_starts()
        self._sample(self.turns[-1].time)

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        super().wait_issued(why, group)
        if why is Wait.W2:
            self._inflight.pop(group, None)
        self._sample(self.turns[-1].time)

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
            time = time if time is not None else self.now()
            self._samples += [(name, time, values[name]) for name in changed]
            self._last_values = values

    def finish(self, trace: StepTrace) -> None:
        """Wait for what was recorded and fill a trace with it; spans of a stream don't overlap."""
        self.turn()
        origin = self.turns[0].time
        times = [turn.time for turn in self.turns] + [time for _, time, _ in self._samples]
        times += [time for copy in self.copies for time in (copy.start, copy.end)]
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

        for turn, until in itertools.pairwise(self.turns):
            place, group = turn.place
            kind = {"": place, "wait": "stall", "recompute": "recompute"}[turn.lost_by]
            wait, label = turn.detail if kind == "stall" else "", group.label if group else ""
            add("compute", turn.time, until.time, kind, label, wait=wait)
        for stream, label, start, end, num_bytes in self.copies:
            add(stream, start, end, stream, label, num_bytes=num_bytes)
        trace.counters = [
            Counter(name, at_us[id(time)] - first_us, value) for name, time, value in self._samples
        ]
