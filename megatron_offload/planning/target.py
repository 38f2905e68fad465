"""How much the offloader may keep on the device, so that a process reserves no more than it should.

Owns a search over steps: the budget is changed by what the reserved memory misses of the target,
until it is there. Must not know torch. What else lies on the device (weights, gradients, what one
kernel needs, what the allocator can't use) needs no model: it is in what was measured.

Invariant: it ends, with the largest budget that was seen to keep the target, if any did. What the
allocator can't use still changes from step to step, so that a budget which kept the target once may
miss it later: then it comes down, a few times at most.
"""

from __future__ import annotations

__all__ = ["MemoryTarget"]

_TOLERANCE_SHARE = 64
_MOST_CHANGES = 8
_MOST_CORRECTIONS = 8


class MemoryTarget:
    """Finds the budget under which a step reserves at most ``target_bytes``.

    Args:
        target_bytes: most device memory that the process should reserve.

    Attributes:
        is_settled: whether the search is over.
        is_met: whether the budget that it ended with keeps the target.
    """

    def __init__(self, target_bytes: int) -> None:
        self.target_bytes = target_bytes
        self.is_settled = False
        self.is_met = False
        self._tolerance_bytes = target_bytes // _TOLERANCE_SHARE
        self._most_kept: int | None = None
        self._least_missed: int | None = None
        self._num_changes = 0
        self._num_corrections = 0

    def propose(
        self, reserved_bytes: int, budget_bytes: int, least_bytes: int, most_bytes: int
    ) -> int:
        """Return the budget for the next step.

        Args:
            reserved_bytes: what the last step has reserved, from an empty cache on.
            budget_bytes: the budget it had.
            least_bytes: what any budget has at least.
            most_bytes: and at most.
        """
        room_bytes = self.target_bytes - reserved_bytes
        is_kept = room_bytes >= 0
        if is_kept:
            self._most_kept = max(budget_bytes, self._most_kept or 0)
        else:
            missed = self._least_missed
            self._least_missed = budget_bytes if missed is None else min(budget_bytes, missed)
        if is_kept and room_bytes <= self._tolerance_bytes:
            return self._settle(budget_bytes)
        # Aim into the middle of what is close enough, between what is known to be too much or not.
        proposal = budget_bytes + room_bytes - self._tolerance_bytes // 2
        kept, missed = self._most_kept, self._least_missed
        if kept is not None and missed is not None and not kept < proposal < missed:
            proposal = (kept + missed) // 2
        proposal = min(max(proposal, least_bytes), most_bytes)
        is_close = kept is not None and abs(proposal - kept) <= self._tolerance_bytes // 2
        if proposal == budget_bytes or is_close or self._num_changes >= _MOST_CHANGES:
            return self._settle(kept if kept is not None else least_bytes)
        self._num_changes += 1
        return proposal

    def correct(self, reserved_bytes: int, budget_bytes: int, least_bytes: int) -> int:
        """Return the budget after a later step, with the search over; less if that step missed.

        Args:
            reserved_bytes: what the process reserves after it.
            budget_bytes: the budget it had.
            least_bytes: what any budget has at least.
        """
        over_bytes = reserved_bytes - self.target_bytes
        if over_bytes <= 0 or self._num_corrections >= _MOST_CORRECTIONS:
            return budget_bytes
        self._num_corrections += 1
        return max(least_bytes, budget_bytes - over_bytes - self._tolerance_bytes // 4)

    def _settle(self, budget_bytes: int) -> int:
        self.is_settled = True
        self.is_met = self._most_kept is not None
        return budget_bytes
