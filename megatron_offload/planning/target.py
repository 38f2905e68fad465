"""How much the offloader may keep on the device, so that a process reserves no more than it should.

What else lies there (weights, gradients, what one kernel needs, what the allocator can't use) needs
no model: it is in what was measured. The search ends, with the largest budget that was seen to keep
the target, if any did. What the allocator can't use still changes from step to step, so a later
step may miss the target: then the budget comes down, a few times at most.
"""

from __future__ import annotations

import logging
from typing import Protocol

from megatron_offload.core.budget import DeviceBudget

_logger = logging.getLogger(__name__)

_TOLERANCE_SHARE = 64
_MOST_CHANGES = 8
_MOST_CORRECTIONS = 8


class _Device(Protocol):
    """What the process reserves, if anyone can tell; cached memory of it can be given back."""

    def reserved_bytes(self) -> int | None: ...
    def trim_device(self) -> None: ...


class MemoryTarget:
    """Finds the budget under which a step reserves at most ``target_bytes``.

    ``is_settled`` once the search is over, ``is_met`` if the budget that it ended with keeps it.
    """

    def __init__(self, target_bytes: int) -> None:
        self.target_bytes = target_bytes
        self.is_settled = self.is_met = False
        self._tolerance_bytes = target_bytes // _TOLERANCE_SHARE
        self._most_kept: int | None = None
        self._least_missed: int | None = None
        self._num_changes = self._num_corrections = 0

    def propose(
        self, reserved_bytes: int, budget_bytes: int, least_bytes: int, most_bytes: int
    ) -> int:
        """Return the budget for the next step, between ``least_bytes`` and ``most_bytes``.

        The last step had ``budget_bytes`` and has reserved ``reserved_bytes``, from an empty cache
        on.
        """
        room_bytes = self.target_bytes - reserved_bytes
        if room_bytes >= 0:
            self._most_kept = max(budget_bytes, self._most_kept or 0)
        elif self._least_missed is None or budget_bytes < self._least_missed:
            self._least_missed = budget_bytes
        if 0 <= room_bytes <= self._tolerance_bytes:
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
        """Return the budget after a later step, with the search over; less if that step missed."""
        over_bytes = reserved_bytes - self.target_bytes
        if over_bytes <= 0 or self._num_corrections >= _MOST_CORRECTIONS:
            return budget_bytes
        self._num_corrections += 1
        return max(least_bytes, budget_bytes - over_bytes - self._tolerance_bytes // 4)

    def _settle(self, budget_bytes: int) -> int:
        self.is_settled = True
        self.is_met = self._most_kept is not None
        return budget_bytes


class BudgetSearch:
    """Brings what a process reserves under a target: first the total, then what a warm-up may add.

    What a step reserves is seen where it began with an empty cache, so every change empties it.
    """

    def __init__(self, target_bytes: int, budget: DeviceBudget, device: _Device) -> None:
        self._total = MemoryTarget(target_bytes)
        self._warmup = MemoryTarget(target_bytes)
        self._budget = budget
        self._device = device
        self._at_start_bytes: int | None = None
        self._at_backward_bytes: int | None = None
        self._is_trimmed = self._is_over = False

    def note_start(self) -> None:
        """A step begins."""
        self._at_start_bytes = self._device.reserved_bytes()

    def note_first_backward(self) -> None:
        """The first backward of a step begins."""
        if not self._warmup.is_settled:
            self._at_backward_bytes = self._device.reserved_bytes()

    def begin_anew(self) -> None:
        """The program has changed: what was reserved for the steps before tells nothing."""
        self._is_trimmed = False

    def follow(self, reserved_bytes: int, *, is_trimmed: bool) -> bool:
        """Set the budget for the next step; return whether the search ended with the last one.

        That has reserved ``reserved_bytes``; ``is_trimmed`` says that the cache was emptied since.
        """
        if is_trimmed:
            self._is_trimmed = True
        elif not self._is_trimmed:
            self._trim()
        elif not self._total.is_settled:
            self._approach(reserved_bytes)
        elif not self._warmup.is_settled:
            self._extend_warmup(reserved_bytes)
        else:
            if self._total.is_met:
                self._keep(reserved_bytes)
            is_first, self._is_over = not self._is_over, True
            return is_first
        return False

    def _trim(self) -> None:
        self._device.trim_device()
        self._is_trimmed = True

    def _approach(self, reserved_bytes: int) -> None:
        """Set the total."""
        budget, target = self._budget, self._total
        least_bytes, most_bytes = budget.bounds_bytes()
        before_bytes = budget.total_bytes
        budget.follow_target(target.propose(reserved_bytes, before_bytes, least_bytes, most_bytes))
        if budget.total_bytes != before_bytes:
            self._trim()
        if target.is_settled and not target.is_met:
            self._warmup.is_settled = True
            _logger.warning(
                "device_target_bytes %d is not met: the last step reserved %d bytes with %d for "
                "offloading, the least is %d; offload more modules or lower the batch",
                *(target.target_bytes, reserved_bytes, budget.total_bytes, least_bytes),
            )
        elif target.is_settled and budget.total_bytes == before_bytes:
            self._extend_warmup(reserved_bytes)

    def _extend_warmup(self, reserved_bytes: int) -> None:
        """Set what the next step may hold above the total until its first backward."""
        budget, at_backward_bytes = self._budget, self._at_backward_bytes
        if at_backward_bytes is None:
            self._warmup.is_settled = True
            return
        if reserved_bytes > self._warmup.target_bytes:
            at_backward_bytes = reserved_bytes
        most_bytes = max(0, budget.bounds_bytes()[1] - budget.total_bytes)
        extra_bytes = budget.warmup_extra_bytes
        proposal = self._warmup.propose(at_backward_bytes, extra_bytes, 0, most_bytes)
        budget.warmup_extra_bytes = proposal
        if proposal != extra_bytes:
            self._trim()

    def _keep(self, reserved_bytes: int) -> None:
        """Come down where the target is missed after all, if the last step did it."""
        budget, before_bytes = self._budget, self._budget.total_bytes
        if (self._at_start_bytes or 0) > self._total.target_bytes:
            self._trim()  # an evaluation, say
            return
        least_bytes, _ = budget.bounds_bytes()
        budget.follow_target(self._total.correct(reserved_bytes, before_bytes, least_bytes))
        over_bytes = before_bytes - budget.total_bytes
        if over_bytes:
            budget.warmup_extra_bytes = max(0, budget.warmup_extra_bytes - over_bytes)
            self._trim()
