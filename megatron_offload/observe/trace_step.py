"""A timeline of what one step's streams do, and of the bytes that it holds.

Nothing blocks the host while it is recorded: times are read when the block is left.
"""

from __future__ import annotations

import itertools
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import STREAMS, ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction
from megatron_offload.observe.measure import Boundary, BoundaryObserver, CopyTimer


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


class _Tracer(BoundaryObserver):
    """What the streams did between the points that the program has passed."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__()
        self._backend = manager.backend
        self._host_pool = manager.host_pool
        self._budget = manager.budget
        self._num_remaking = 0
        self._live_bytes: dict[GroupKey, int] = {}
        self._inflight: Tally[OffloadGroup] = Tally()
        self._since: Any = None  # when the wait began
        # What compute does from a time on: kind, label, wait.
        self._turns: list[tuple[Any, str, str, str]] = []
        self._copies = CopyTimer(manager.backend)
        self._samples: list[tuple[str, Any, float]] = []
        self._last_values: dict[str, float] = {}
        self._turn()
        self._sample()

    # Boundaries

    def passed(self, boundary: Boundary, group: OffloadGroup) -> None:
        self._num_remaking = 0  # also where an exception has ended it
        if boundary == "done":
            self._live_bytes.pop(group.key, None)
        self._turn()

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        super().group_commits(group, is_delayed=is_delayed)
        if group.key not in self._live_bytes:
            num_bytes = sum(block.num_bytes for block in group.blocks() if block.flight is None)
            self._live_bytes[group.key] = num_bytes

    def group_committed(self, group: OffloadGroup) -> None:
        remade_bytes = sum(unit.num_bytes for unit in group.remade if unit.is_remade)
        self._live_bytes[group.key] -= remade_bytes
        self._sample()

    def backward_entered(self, group: OffloadGroup) -> None:
        self._sample()

    backward_left = backward_entered

    def _turn(self) -> Any:
        """Note what compute does from now on; return when that is."""
        kind, group = self.open[-1] if self.open else ("other", None)
        time, label = self._now(), group.label if group else ""
        self._turns.append((time, "remake" if self._num_remaking else kind, label, ""))
        return time

    # Copies, waits, and what is made again

    def remake_starts(self, block: Block) -> None:
        self._num_remaking += 1
        self._turn()

    def remade(self, block: Block, made: torch.Tensor) -> None:
        self._num_remaking -= 1
        self._turn()

    def copy_starts(self, direction: Direction) -> None:
        if direction == "h2d":  # else the host's memory is taken, and nothing is in it yet
            self._sample()
        self._copies.copy_starts(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        self._copies.copy_issued(direction, pairs, group)
        if direction == "d2h":
            self._inflight[group] += self._copies.copies[-1].num_bytes

    def wait_starts(self) -> None:
        self._since = self._now()
        self._sample(self._since)

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        _, _, label, _ = self._turns[-1]
        self._turns.append((self._since, "stall", label, why.name))
        after = self._turn()
        if why is Wait.W2:
            self._inflight.pop(group, None)
        self._sample(after)

    def _now(self) -> Any:
        return self._backend.timestamp(self._backend.compute_stream())

    # Counters

    def _sample(self, time: Any = None) -> None:
        """Note the counters that have changed, at ``time`` or where the compute stream is now."""
        on_host, in_flight = self._host_pool.stats.in_use_bytes, self._inflight.total()
        live_bytes = sum(self._live_bytes.values())
        values: dict[str, float] = {
            ByteCount.INFLIGHT: in_flight,
            ByteCount.HOST: on_host,
            ByteCount.PREFETCHED: self._budget.held_bytes,
            ByteCount.LIVE: live_bytes,
            # What lies on the host and in flight is held twice; what came back before its release
            # is in flight alone.
            ByteCount.HELD: min(max(live_bytes - on_host + in_flight, 0), live_bytes),
        }
        changed = [name for name in values if values[name] != self._last_values.get(name)]
        if changed:
            time = time if time is not None else self._now()
            self._samples += [(name, time, values[name]) for name in changed]
            self._last_values = values

    # The trace

    def finish(self, trace: StepTrace) -> None:
        """Wait for what was recorded and fill a trace with it; spans of a stream don't overlap."""
        self._turn()
        origin = self._turns[0][0]
        times = [time for time, *_ in self._turns] + [time for _, time, _ in self._samples]
        times += [time for copy in self._copies.copies for time in (copy.start, copy.end)]
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

        for (start, kind, label, wait), (end, *_) in itertools.pairwise(self._turns):
            add("compute", start, end, kind, label, wait=wait)
        for stream, label, start, end, num_bytes in self._copies.copies:
            add(stream, start, end, stream, label, num_bytes=num_bytes)
        trace.counters = [
            Counter(name, at_us[id(time)] - first_us, value) for name, time, value in self._samples
        ]
