"""From what steps show of a plan to the next target to plan for, and to the plan that stays.

    auto           without*  with*  (without  with) x 3     the first plan
                             with*  (without  with) x 3     each that comes after it
    memory_target            with*            with  x 3     each plan

Steps with a star don't count: each is the first behind a change, which takes memory anew.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from megatron_offload.core.units import format_bytes
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan, keep_all

_NUM_STEPS = 3
"""Steps of each kind that count, for each plan."""

_MARGIN_SHARE = 64
"""Targets that differ by less than this share are the same."""

_SLACK_SHARE = 16
"""A rank that leaves more than this share of its target unused may reserve more."""

_AIM_SHARE = 32
"""What it then still leaves."""


class Next(enum.Enum):
    """What is to be done next."""

    WITHOUT = "take a step that moves nothing"
    WITH = "take a step that follows the plan"
    PLAN = "plan for other targets"
    NOTHING = "follow the plan that stays"


class PlanSearch(ABC):
    """Says what to do next; told the same on all ranks, it decides the same on all.

    Args:
        plan: the first one.
        targets: what it was made for, by pipeline rank.
        most_plans: to measure, the first one included; 0 trusts the prediction.

    Attributes:
        plan: the one that is followed; in the end the one that stays.
        targets: what a plan is wanted for, with `Next.PLAN`.
        said: the verdict on a plan that the last step has brought, for people.
        is_kept: whether the plan that stays keeps what was promised.
    """

    _kinds: ClassVar[tuple[Next, ...]]

    def __init__(self, plan: OffloadPlan, targets: Sequence[int], most_plans: int) -> None:
        self.plan = plan
        self.targets: tuple[int, ...] | None = None
        self.said = ""
        self.is_kept = True
        self._planned = tuple(targets)
        self._most_plans = most_plans
        self._tried: list[OffloadPlan] = []
        self._measured: list[OffloadPlan] = []
        self._steps: deque[tuple[Next, bool]] = deque()
        self._shown: list[tuple[Next, float, Sequence[int]]] = []
        if most_plans and plan.moved_bytes:
            self._begin(plan)

    @property
    def next(self) -> Next:
        """What is to be done next."""
        if self._steps:
            return self._steps[0][0]
        return Next.NOTHING if self.targets is None else Next.PLAN

    @property
    def wants_empty(self) -> bool:
        """Whether what is reserved and unused is to be handed back before the next step."""
        return len(self._steps) == _NUM_STEPS and Next.WITHOUT not in self._kinds

    def note(self, step_us: float, reserved_bytes: Sequence[int]) -> None:
        """Take what the step that `next` asked for has shown.

        Args:
            step_us: its length on the slowest rank.
            reserved_bytes: the most on each pipeline rank.
        """
        kind, counts = self._steps.popleft()
        self.said = ""
        if counts:
            self._shown.append((kind, step_us, reserved_bytes))
        if self._steps:
            return
        targets = self._judge()
        self._measured.append(self.plan)
        if targets is None or len(self._measured) == self._most_plans:
            self._settle()
        else:
            self.targets = targets

    def answer(self, plan: OffloadPlan | None) -> None:
        """Take the plan for `targets`; None where there is none."""
        assert self.targets is not None
        if plan is None:
            # Who was to come down does so by half.
            pairs = [
                (old, new if new >= old else (old + new) // 2)
                for old, new in zip(self._planned, self.targets, strict=True)
            ]
            self.targets = tuple(new for _, new in pairs)
            if all(old - new <= old // (4 * _MARGIN_SHARE) for old, new in pairs):
                self._settle()
        elif plan in self._tried or not (plan.moved_bytes or self._kinds == (Next.WITH,)):
            self._settle()
        else:
            self._planned, self.targets = self.targets, None
            self.said += ": planned again"
            self._begin(plan)

    def _begin(self, plan: OffloadPlan) -> None:
        self.plan = plan
        skipped = (Next.WITH,) if self._tried else self._kinds
        self._tried.append(plan)
        self._shown = []
        self._steps.extend((kind, False) for kind in skipped)
        self._steps.extend((kind, True) for kind in self._kinds * _NUM_STEPS)

    def _settle(self) -> None:
        """Let the best of the plans that were measured stay."""
        last, self.targets = self.plan, None
        self.plan = min(self._measured, key=self._rating)
        self.is_kept = not self._rating(self.plan)[0]
        if not self.is_kept:
            self._give_up()
        elif self.plan is last:
            self.said += ": kept"
        else:
            self.said += "; an earlier plan is followed again: kept"

    @abstractmethod
    def _judge(self) -> tuple[int, ...] | None:
        """Write into the plan what was measured; return the next targets, None for no other."""

    @abstractmethod
    def _rating(self, plan: OffloadPlan) -> tuple[int, int]:
        """Return by how much a plan breaks its promise, and what is compared besides; less wins."""

    @abstractmethod
    def _give_up(self) -> None:
        """Say what becomes of the best plan, which breaks its promise."""


class TimeSearch(PlanSearch):
    """Finds the plan with the least memory that costs no more of the step's time than it may.

    It halves what lies between a plan that was too slow and one that was quick enough, by the
    predicted peaks of their fullest ranks; moving nothing is quick enough, at ``highest_bytes``.
    """

    _kinds = (Next.WITHOUT, Next.WITH)

    def __init__(
        self, plan: OffloadPlan, highest_bytes: int, most_slowdown_percent: float, most_plans: int
    ) -> None:
        super().__init__(plan, (_peak_bytes(plan),) * plan.pp_size, most_plans)
        self._most_slowdown_percent = most_slowdown_percent
        self._least_gap_bytes = highest_bytes // _MARGIN_SHARE
        self._quick_bytes = highest_bytes
        self._slow_bytes: int | None = None

    def _judge(self) -> tuple[int, ...] | None:
        cost = MeasuredCost.of(
            *([us for kind, us, _ in self._shown if kind is each] for each in self._kinds)
        )
        self.plan = replace(self.plan, measured=cost)
        self.said = f"the plan costs {cost}, at most {self._most_slowdown_percent:g} % is wanted"
        peak_bytes = _peak_bytes(self.plan)
        if self._is_quick(cost):
            self._quick_bytes = min(self._quick_bytes, peak_bytes)
        else:
            self._slow_bytes = max(self._slow_bytes or 0, peak_bytes, self._planned[0])
        if self._slow_bytes is None or self._quick_bytes - self._slow_bytes < self._least_gap_bytes:
            return None
        return ((self._quick_bytes + self._slow_bytes) // 2,) * self.plan.pp_size

    def _is_quick(self, cost: MeasuredCost) -> bool:
        return cost.slowdown_percent <= self._most_slowdown_percent + cost.noise_percent

    def _rating(self, plan: OffloadPlan) -> tuple[int, int]:
        assert plan.measured is not None
        return int(not self._is_quick(plan.measured)), _peak_bytes(plan)

    def _give_up(self) -> None:
        costs = [plan.measured.slowdown_percent for plan in self._measured if plan.measured]
        self.plan = keep_all(
            self.plan,
            f"moving costs too much time: {', '.join(f'{cost:+.2f}' for cost in costs)} % of the "
            f"step was measured, at most {self._most_slowdown_percent:g} % is wanted",
        )
        self.said += "; nothing moves from here on: no plan was fast enough"


class MemorySearch(PlanSearch):
    """Finds the plan that moves least of those under which no rank reserves more than it should.

    Where a rank reserves more than its target, the next plan is made for a target that is lower by
    as much and a little more; where it reserves far less, for a higher one. What was seen to miss
    is not planned for again.
    """

    _kinds = (Next.WITH,)

    def __init__(self, plan: OffloadPlan, wanted_bytes: Sequence[int], most_plans: int) -> None:
        super().__init__(plan, wanted_bytes, most_plans)
        self._wanted_bytes = tuple(wanted_bytes)
        self._least_missed: list[int | None] = [None] * len(wanted_bytes)

    def _judge(self) -> tuple[int, ...] | None:
        reserved = list(map(max, zip(*(sizes for _, _, sizes in self._shown), strict=True)))
        pairs = zip(self.plan.ranks, reserved, strict=True)
        ranks = tuple(replace(rank, measured_peak_bytes=most) for rank, most in pairs)
        self.plan = replace(self.plan, ranks=ranks)
        self.said = (
            f"ranks reserve {_sizes(reserved)} where {_sizes([each.moved_bytes for each in ranks])}"
            f" move, at most {_sizes(self._wanted_bytes)} is wanted"
        )
        targets = tuple(self._next_target(rank, most) for rank, most in enumerate(reserved))
        return None if targets == self._planned else targets

    def _next_target(self, rank: int, reserved_bytes: int) -> int:
        planned, wanted = self._planned[rank], self._wanted_bytes[rank]
        room, least_missed = wanted - reserved_bytes, self._least_missed[rank]
        if room < 0:
            self._least_missed[rank] = planned
            return planned + room - wanted // _MARGIN_SHARE
        if not self.plan.ranks[rank].moved_bytes or room <= wanted // _SLACK_SHARE:
            return planned
        higher = planned + room - wanted // _AIM_SHARE
        if least_missed is not None and higher >= least_missed:
            higher = (planned + least_missed) // 2
            if higher - planned < wanted // _MARGIN_SHARE:
                return planned
        return higher

    def _rating(self, plan: OffloadPlan) -> tuple[int, int]:
        pairs = zip(plan.ranks, self._wanted_bytes, strict=True)
        missed = (max(0, (rank.measured_peak_bytes or 0) - wanted) for rank, wanted in pairs)
        return sum(missed), plan.moved_bytes

    def _give_up(self) -> None:
        missed_bytes, _ = self._rating(self.plan)
        self.said += f"; {format_bytes(missed_bytes, 2)} more than wanted stay reserved"


def _peak_bytes(plan: OffloadPlan) -> int:
    """Return what the fullest rank is predicted to take."""
    return max(rank.predicted_peak_bytes or 0 for rank in plan.ranks)


def _sizes(sizes: Sequence[int]) -> str:
    """Return one size where all are the same."""
    return ", ".join(
        format_bytes(size, 2) for size in (sizes if len(set(sizes)) > 1 else sizes[:1])
    )
