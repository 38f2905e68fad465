"""What one rank's work takes of memory without offload, and when its groups could be away."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import StepTrace
from megatron_offload.planning.job import GroupWork, Job, PendingMessages
from megatron_offload.planning.schedule import PassKind


class LiveGroup(NamedTuple):
    """A group that can move."""

    key: GroupKey
    num_bytes: int
    first_row: int
    """The first piece of work that it may be away in."""
    end_row: int
    """The one that needs it again."""
    life_us: float
    """From its commit to its backward."""


class Footprint:
    """One rank's step without offload, a row for each piece of work.

    Args:
        job: the step.
        rank: pipeline rank.
        trace: what was simulated of it.

    Attributes:
        rows: bytes that are allocated while a piece of work runs.
        groups: those that can move.
        times_us: of every group its start, commit, and backward's begin and end.
        largest_bytes: of one group.
        saved_bytes: the most that groups hold at one time.
    """

    def __init__(self, job: Job, rank: int, trace: StepTrace | None) -> None:
        assert trace is not None
        self.groups: list[LiveGroup] = []
        self.times_us: dict[GroupKey, list[float]] = {}
        self._spans = iter(
            span for span in trace.spans if span.stream == "compute" and span.kind != "stall"
        )
        self._now_us = 0.0
        self._held_bytes = job.static_bytes[rank]
        self._pending = PendingMessages(job, rank)
        self._rows: list[int] = []
        first_rows: dict[GroupKey, int] = {}
        chunks: dict[tuple[int, int], int] = {}
        for one in job.schedule.ranks[rank]:
            stage = job.stages[one.stage]
            marked = [work.is_marked for work in stage.groups]
            if any(marked):
                chunks.setdefault((one.stage, one.microbatch), len(chunks))
            is_forward = one.kind is PassKind.FORWARD
            for place in range(len(marked))[:: 1 if is_forward else -1]:
                work = stage.groups[place]
                times = self._add_row(one.kind, work, stage.buffer_bytes)
                if not work.is_marked or one.kind is PassKind.WEIGHT:
                    continue
                key = GroupKey(chunks[one.stage, one.microbatch], sum(marked[:place]))
                if is_forward:
                    self.times_us[key] = [*times]
                    first_rows[key] = len(self._rows)
                    continue
                self.times_us[key] += times
                if work.num_bytes:
                    _, committed_us, backward_us, _ = self.times_us[key]
                    last, life_us = len(self._rows) - 1, backward_us - committed_us
                    group = LiveGroup(key, work.num_bytes, first_rows[key], last, life_us)
                    self.groups.append(group)
            self._pending.add_pass(one)
        self.rows = np.array(self._rows, dtype=np.int64)
        self.largest_bytes = max((group.num_bytes for group in self.groups), default=0)
        changes = np.zeros(len(self._rows) + 1, dtype=np.int64)
        for group in self.groups:
            changes[group.first_row] += group.num_bytes
            changes[group.end_row] -= group.num_bytes
        self.saved_bytes = int(np.cumsum(changes).max(initial=0))

    def _add_row(self, kind: PassKind, work: GroupWork, buffer_bytes: int) -> tuple[float, float]:
        """Add a piece of work; return its begin and end."""
        temp_bytes, us = work.backward_temp_bytes, work.backward_us
        if kind is PassKind.FORWARD:
            temp_bytes, us = work.forward_temp_bytes, work.forward_us
            self._held_bytes += work.num_bytes + work.kept_bytes
        elif kind is PassKind.WEIGHT:
            us = work.weight_us
            self._held_bytes -= work.gradient_bytes
        else:
            temp_bytes += work.backward_block_bytes
            if kind is PassKind.INPUT:
                us -= work.weight_us
                self._held_bytes += work.gradient_bytes
        self._rows.append(self._held_bytes + temp_bytes + buffer_bytes + self._pending.num_bytes)
        if kind in (PassKind.BACKWARD, PassKind.WEIGHT):
            self._held_bytes -= work.num_bytes + work.kept_bytes
        start_us = self._now_us
        if us > 0:
            span = next(self._spans)
            start_us, self._now_us = span.start_us, span.end_us
        return start_us, self._now_us
