"""What one rank's work takes of memory, and which of its groups could be offloaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.planning.schedule import PassKind
from megatron_offload.planning.simulate import RankResult


class LiveGroup(NamedTuple):
    """A group that can be offloaded."""

    key: GroupKey
    num_bytes: int
    first_row: int  # the first piece of work in which it may be offloaded
    end_row: int  # the one that needs it again
    life_us: float  # from its commit to its backward


class Footprint:
    """One rank's step without offload, as simulated and recorded, a row for each piece of work.

    Attributes:
        rows: bytes that are taken while a piece of work runs.
        groups: those that can be offloaded.
        keys: those of the groups.
        times_us: of every group its start, commit, and backward's begin and end.
    """

    def __init__(self, profile: StepProfile, step: RankResult) -> None:
        assert step.trace is not None
        sizes = {group.key: group.num_bytes for group in profile.groups}
        self.rows = np.array([piece.taken_bytes for piece in step.pieces], dtype=np.int64)
        self.groups: list[LiveGroup] = []
        self.times_us: dict[GroupKey, list[float]] = {key: [] for key in sizes}
        first_rows: dict[GroupKey, int] = {}
        spans = (span for span in step.trace.of("compute") if span.kind != "stall")
        start_us = end_us = 0.0
        for row, piece in enumerate(step.pieces):
            start_us = end_us
            if piece.us > 0:
                span = next(spans)
                start_us, end_us = span.start_us, span.end_us
            if piece.key not in sizes:
                continue
            times_us = self.times_us[piece.key]
            times_us += (start_us, end_us)
            if piece.kind is PassKind.FORWARD:
                first_rows[piece.key] = row + 1
            elif num_bytes := sizes[piece.key]:
                place = first_rows[piece.key], row, start_us - times_us[1]
                self.groups.append(LiveGroup(piece.key, num_bytes, *place))
        self.keys = frozenset(group.key for group in self.groups)
        in_order = sorted(self.groups, key=lambda group: group.first_row)
        largest = sorted(in_order, key=lambda group: (-group.num_bytes, -group.life_us))
        # So that the first of them, however many, lie evenly over the step.
        num_bits = len(in_order).bit_length()
        places = sorted(range(len(in_order)), key=lambda place: f"{place:0{num_bits}b}"[::-1])
        self._orders = [in_order[place] for place in places], largest

    @property
    def saved_bytes(self) -> int:
        """The most that groups hold at one time."""
        changes = np.zeros(len(self.rows) + 1, dtype=np.int64)
        for group in self.groups:
            changes[group.first_row] += group.num_bytes
            changes[group.end_row] -= group.num_bytes
        return int(np.cumsum(changes).max(initial=0))

    def cover(self, order: int, target_bytes: int, budget_bytes: int) -> list[GroupKey]:
        """Return what moves so that its rows keep a target, in an order, less what need not.

        The orders are 0, spread over the step, and 1, the largest first. Of what is live in a row
        and moves, as much as the room is there still.
        """
        over = self.rows - target_bytes
        lacking = np.where(over > 0, over + budget_bytes, -(2**62))  # there nothing is wanted
        taken = []
        for group in self._orders[order]:
            rows = lacking[group.first_row : group.end_row]
            if rows.max(initial=0) > 0:
                rows -= group.num_bytes
                taken.append(group)
        moved = []
        for group in reversed(taken):
            rows = lacking[group.first_row : group.end_row]
            if rows.max() + group.num_bytes <= 0:
                rows += group.num_bytes
            else:
                moved.append(group.key)
        return moved
