"""A plan that has to keep its promise of memory, held against what ranks reserve.

Each plan takes three steps. The first doesn't count: host memory is pinned in it. What is unused is
handed back before the second; the third shows what the second's optimizer has reserved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron_offload.core.units import format_bytes
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import TargetError
from megatron_offload.observe.measure import can_weigh, weigh_step
from megatron_offload.planning.plan import OffloadPlan

_logger = logging.getLogger(__name__)

_NUM_STEPS = 3

_MARGIN_SHARE = 64
"""A miss is answered by so much less of the target than what it was missed by."""

_SLACK_SHARE = 16
"""A rank that leaves more than this share of its target unused may reserve more."""

_AIM_SHARE = 32
"""What it then still leaves."""


class TargetCheck:
    """Says which targets to plan for, so that each rank reserves what it should.

    Where a rank reserves more than its target, the next plan is made for a target that is lower by
    as much and a little more; where it reserves far less, for a higher one. What was seen to miss
    is not planned for again. ``planned_bytes`` are the targets that the plan is made for.
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
        """Take what a plan for `planned_bytes` has shown; return whether to plan for the next.

        Args:
            reserved_bytes: by each rank, at most.
            moved_bytes: by each rank; one that moves nothing can't do with less.
        """
        self._num_plans_left -= 1
        before = self._measured_bytes = self.planned_bytes
        self.planned_bytes = tuple(
            self._next(rank, reserved, moves=moved > 0)
            for rank, (reserved, moved) in enumerate(zip(reserved_bytes, moved_bytes, strict=True))
        )
        return self.planned_bytes != before and self._num_plans_left > 0

    def give_way(self) -> bool:
        """Ask ranks to come down by half only; return whether that is still worth a plan."""
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


@dataclass
class MemoryCheck:
    """Keeps a plan under which no rank reserves more than it should, or has another one made.

    Of the plans that were measured the one stays that keeps all targets and moves least; where none
    does, the one that misses them by least, with a warning.
    """

    manager: PipelineOffloadManager
    target_bytes: Sequence[int]
    """Most that each pipeline rank should reserve, in order."""
    most_plans: int
    """To measure; 0 for no check."""
    make_plan: Callable[[Sequence[int]], OffloadPlan]
    """Makes a plan for such targets on all ranks together, which the managers follow; raises
    `TargetError` on all ranks where one can't be kept."""
    gather: Callable[[int], Sequence[int]]
    """Tells the most that was reserved on each pipeline rank to all, in order; collective."""

    plan: OffloadPlan = field(init=False)
    _measured: list[tuple[int, int, OffloadPlan]] = field(default_factory=list)
    _num_steps: int = 0
    _reserved_bytes: int = 0

    def __post_init__(self) -> None:
        self._check = TargetCheck(self.target_bytes, self.most_plans)

    def begin(self, plan: OffloadPlan) -> bool:
        """Take a plan; return whether there is a step to take."""
        self.plan = plan
        return self.most_plans > 0 and can_weigh(self.manager)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Weigh the step that is taken inside."""
        with weigh_step(self.manager, empties=self._num_steps == 1) as weighed:
            yield
        self._num_steps += 1
        if self._num_steps > 1:
            self._reserved_bytes = max(self._reserved_bytes, weighed.reserved_bytes)

    def note(self) -> tuple[bool, str]:
        """Return whether it is over, and the verdict on a plan where there is one; collective."""
        check = self._check
        if self._num_steps < _NUM_STEPS:
            return False, ""
        reserved = self.gather(self._reserved_bytes)
        self._num_steps = self._reserved_bytes = 0
        self.plan = _with_measured(self.plan, reserved)
        missed_bytes = check.missed_bytes(reserved)
        self._measured.append((missed_bytes, self.plan.moved_bytes, self.plan))
        moved = [rank.moved_bytes for rank in self.plan.ranks]
        text = (
            f"ranks reserve {_sizes(reserved)} where {_sizes(moved)} move, "
            f"at most {_sizes(self.target_bytes)} is wanted"
        )
        if check.wants_another(reserved, moved) and self._plan_again():
            _logger.info("%s: planned again", text)
            return False, f"{text}: planned again"
        return True, self._settle(text)

    def _plan_again(self) -> bool:
        """Return whether there is a plan that wasn't measured yet; the manager follows it then."""
        before = self.plan
        while self.plan is before:
            try:
                self.plan = self.make_plan(self._check.planned_bytes)
            except TargetError as error:
                if not self._check.give_way():
                    _logger.info("no other plan: %s", error)
                    return False
        known = [_with_measured(plan, None) for _, _, plan in self._measured]
        if self.plan not in known:
            return True
        self.plan = before
        return False

    def _settle(self, text: str) -> str:
        """Follow the best of the plans that were measured; return what there is to say."""
        missed_bytes, _, best = min(self._measured, key=lambda measured: measured[:2])
        if best is not self.plan:
            text += "; an earlier plan is followed again"
        self.plan = best
        self.manager.follow_plan(best)
        if missed_bytes:
            text += f"; {format_bytes(missed_bytes, 2)} more than wanted stay reserved"
            _logger.warning("%s", text)
        else:
            text += ": kept"
            _logger.info("%s", text)
        return text


def _with_measured(plan: OffloadPlan, reserved_bytes: Sequence[int] | None) -> OffloadPlan:
    found: Sequence[int | None] = reserved_bytes or [None] * plan.pp_size
    pairs = zip(plan.ranks, found, strict=True)
    return replace(
        plan, ranks=tuple(replace(rank, measured_peak_bytes=each) for rank, each in pairs)
    )


def _sizes(sizes: Sequence[int]) -> str:
    """Return one size where all are the same."""
    return ", ".join(
        format_bytes(size, 2) for size in (sizes if len(set(sizes)) > 1 else sizes[:1])
    )
