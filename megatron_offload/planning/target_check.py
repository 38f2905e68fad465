"""What ranks were measured to reserve under a plan for a memory target, and what follows from it.

Owns the verdict, and the targets to plan for next. Must not know plans, ranks or devices: it is
told bytes.

A plan for a target rests on one step without offload and on what the allocator could not use in it;
with offload that is another number, mostly a smaller one. So where a rank reserves more than its
target, the next plan is made for a target that is lower by as much and a little more. Where a rank
reserves far less it copies more than it has to, and the next plan is made for a higher one. What
was seen to miss is not planned for again.

Invariants: same bytes, same verdict, so ranks that are told the same agree; it ends after a given
number of plans. Read next: `megatron_offload.autotune.memory`, which takes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TargetCheck"]

_MARGIN_SHARE = 64
"""A miss is answered by so much less of the target than what it was missed by."""

_SLACK_SHARE = 16
"""A rank that leaves more than this share of its target unused may reserve more."""

_AIM_SHARE = 32
"""What it then still leaves."""


class TargetCheck:
    """Says which targets to plan for, so that each rank reserves what it should.

    Args:
        target_bytes: most that each pipeline rank should reserve, in order.
        most_plans: to measure; at least 1.

    Attributes:
        planned_bytes: for each rank the target that the plan is made for.
    """

    def __init__(self, target_bytes: Sequence[int], most_plans: int) -> None:
        self.planned_bytes = tuple(target_bytes)
        self._target_bytes = tuple(target_bytes)
        self._num_plans_left = most_plans
        self._least_missed: list[int | None] = [None] * len(target_bytes)
        self._measured_bytes = self.planned_bytes

    def missed_bytes(self, reserved_bytes: Sequence[int]) -> int:
        """Return what ranks reserve above their targets, all together."""
        pairs = zip(reserved_bytes, self._target_bytes, strict=True)
        return sum(max(0, reserved - target) for reserved, target in pairs)

    def wants_another(self, reserved_bytes: Sequence[int], moved_bytes: Sequence[int]) -> bool:
        """Take what a plan for `planned_bytes` has shown; return whether to plan again.

        Args:
            reserved_bytes: by each rank, at most.
            moved_bytes: by each rank; one that moves nothing can't do with less.

        Returns:
            Whether another plan is wanted, for what is in `planned_bytes` then.
        """
        self._num_plans_left -= 1
        before = self._measured_bytes = self.planned_bytes
        self.planned_bytes = tuple(
            self._next(rank, reserved, moves=moved > 0)
            for rank, (reserved, moved) in enumerate(zip(reserved_bytes, moved_bytes, strict=True))
        )
        return self.planned_bytes != before and self._num_plans_left > 0

    def give_way(self) -> bool:
        """Ask for less, where no plan can be made; return whether there is less to ask for.

        Ranks that were to come down come down by half of that only.
        """
        before = self.planned_bytes
        self.planned_bytes = tuple(
            planned if planned >= measured else (planned + measured) // 2
            for planned, measured in zip(before, self._measured_bytes, strict=True)
        )
        least_step = min(self._target_bytes) // (4 * _MARGIN_SHARE)
        return any(
            measured - planned > least_step
            for planned, measured in zip(self.planned_bytes, self._measured_bytes, strict=True)
        )

    def _next(self, rank: int, reserved_bytes: int, *, moves: bool) -> int:
        planned, target = self.planned_bytes[rank], self._target_bytes[rank]
        room, least_missed = target - reserved_bytes, self._least_missed[rank]
        if room < 0:
            self._least_missed[rank] = planned
            return planned + room - target // _MARGIN_SHARE
        if not moves or room <= target // _SLACK_SHARE:
            return planned
        higher = planned + room - target // _AIM_SHARE
        if least_missed is not None and higher >= least_missed:
            higher = (planned + least_missed) // 2
            if higher - planned < target // _MARGIN_SHARE:
                return planned
        return higher
