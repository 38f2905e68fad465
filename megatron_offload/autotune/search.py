"""From what the steps of a plan have shown to the next plan, and to the one that stays."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, ModulesConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan, keep_all

_MOST_PLANNING_S = 10.0

_MARGIN_SHARE = 96
"""Targets that differ by less than this share are the same; so much is left to spare."""

_SLACK_SHARE = 48
"""A rank that leaves more than this share of its target unused may reserve more."""

_AIM_COST, _ENOUGH_COST, _MOST_COST = 0.75, 0.65, 0.8
"""Shares of what a step may cost, by what it loses itself: aimed at; enough, so that nothing more
is tried; still kept. The rest is for what copies slow kernels, which no wait shows: on an H200
steps that lost 0.7 and 8.0 % by themselves were 1.1 and 10.0 % longer than without offload."""

_LEAST_PROGRESS = 0.25
"""Share of the way from a plan that is quick enough to one that isn't, that is tried at least."""


class PlanSearch(ABC):
    """Asks for few plans, one after the other, until one stays.

    Args:
        chooser: makes them.
        most_plans: to measure; 0 trusts the prediction.
        everything: what the first steps did, and what that has cost.

    Attributes:
        plan: what is to be followed.
        is_settled: whether it stays.
        is_kept: whether it keeps what was promised.
        said: what there is to say of it, for people.
    """

    def __init__(self, chooser: Chooser, most_plans: int, everything: OffloadPlan) -> None:
        self.is_settled, self.is_kept, self.said = False, True, ""
        self._chooser = chooser
        self._most_plans = most_plans
        self._planning_s = 0.0
        self._tried: list[OffloadPlan] = [everything] if everything.measured else []
        self._num_measured = 0
        self.plan = self._make(self._first) or everything
        if not most_plans or not self.plan.moved_bytes:
            self.is_settled = True
            self.said = f"{_what(self.plan)}, as predicted"

    def note(self, cost: MeasuredCost, reserved_bytes: Sequence[int | None]) -> None:
        """Take what steps that follow the plan have shown: their cost, what each rank reserves."""
        pairs = zip(self.plan.ranks, reserved_bytes, strict=True)
        ranks = tuple(replace(rank, measured_peak_bytes=most) for rank, most in pairs)
        self.plan = replace(self.plan, ranks=ranks, measured=cost)
        self._tried.append(self.plan)
        self._num_measured += 1
        may_go_on = self._num_measured < self._most_plans and self._planning_s < _MOST_PLANNING_S
        plan = self._make(self._next) if may_go_on else None
        if plan is not None and not any(map(plan.is_like, self._tried)):
            self.plan = plan
            return
        self.is_settled = True
        self.plan = min(self._tried, key=self._rating)
        self.is_kept = not self._rating(self.plan)[0]
        if not self.is_kept:
            self.plan = self._instead()
        self.said = f"{_what(self.plan)}{self._promise()}"

    def _make(self, wanted: Callable[[], OffloadPlan | None]) -> OffloadPlan | None:
        began_s = time.monotonic()
        try:
            return wanted()
        except TargetError as error:
            self.said = str(error)
            return None
        finally:
            self._planning_s += time.monotonic() - began_s

    @abstractmethod
    def _first(self) -> OffloadPlan: ...

    @abstractmethod
    def _next(self) -> OffloadPlan | None:
        """Return another plan to try, None where that brings nothing."""

    @abstractmethod
    def _rating(self, plan: OffloadPlan) -> tuple[float, int]:
        """Return by how much a plan breaks its promise, and what is compared besides; less wins."""

    @abstractmethod
    def _promise(self) -> str:
        """Return what was wanted, in words."""

    def _instead(self) -> OffloadPlan:
        """Return what is followed where the best breaks its promise."""
        return self.plan


class CostSearch(PlanSearch):
    """Finds the plan with the least memory that loses no more of the step's time than it may.

    Between a plan that was quick enough and one that was not, it aims where the cost would be just
    right if it grew evenly; it grows faster the less memory is left, so that is quick enough.
    """

    def __init__(
        self,
        chooser: Chooser,
        policy: AutoConfig,
        everything: OffloadPlan,
        capacity_bytes: int | None = None,
    ) -> None:
        self._limit = policy.most_slowdown_percent
        self._capacity_bytes = capacity_bytes
        super().__init__(chooser, policy.measured_plans, everything)

    def _first(self) -> OffloadPlan:
        plan = self._chooser.within(self._limit)
        lower = (one for one in self._tried if _peak_bytes(one) <= _peak_bytes(plan))
        if any(self._is_quick(_cost(one)) for one in lower):
            plan = self._next() or plan  # everything may move, so in less room
        return plan if self._fits(plan) else self._under(self._capacity_bytes or 0)

    def _under(self, target_bytes: int) -> OffloadPlan:
        target_bytes = max(self._chooser.lowest_bytes, target_bytes)
        plan = self._chooser.under((target_bytes,) * len(self._chooser.without.ranks))
        return replace(plan, policy="auto")

    def _fits(self, plan: OffloadPlan) -> bool:
        return self._capacity_bytes is None or _peak_bytes(plan) <= self._capacity_bytes

    def _next(self) -> OffloadPlan | None:
        highest_bytes, lowest_bytes = self._chooser.highest_bytes, self._chooser.lowest_bytes
        points = [(_peak_bytes(plan), _cost(plan)) for plan in self._tried]
        points.append((highest_bytes, 0.0))
        quick_bytes, quick_cost = min(one for one in points if self._is_quick(one[1]))
        slow = [one for one in points if not self._is_quick(one[1]) and one[0] < quick_bytes]
        if slow and quick_cost >= _ENOUGH_COST * self._limit > 0:
            return None
        slow_bytes, slow_cost = max(slow, default=(lowest_bytes, 0.0))
        share = (_AIM_COST * self._limit - quick_cost) / max(slow_cost - quick_cost, 1e-9)
        if quick_bytes < highest_bytes:
            share = max(share, _LEAST_PROGRESS if slow else 1.0)
        target_bytes = quick_bytes - int((quick_bytes - slow_bytes) * min(1.0, share))
        if self._capacity_bytes is not None:
            target_bytes = min(target_bytes, self._capacity_bytes)
        if quick_bytes - target_bytes < highest_bytes // _MARGIN_SHARE:
            return None
        return self._under(target_bytes)

    def _is_quick(self, cost_percent: float) -> bool:
        return cost_percent <= _MOST_COST * self._limit

    def _rating(self, plan: OffloadPlan) -> tuple[float, int]:
        cost = _cost(plan)
        return (0.0 if self._is_quick(cost) else cost), _peak_bytes(plan)

    def _instead(self) -> OffloadPlan:
        if self._capacity_bytes is not None and self._chooser.highest_bytes > self._capacity_bytes:
            return self.plan
        return keep_all(self.plan, f"moving costs {self.plan.measured}, which is too much time")

    def _promise(self) -> str:
        found = min(self._tried, key=self._rating).measured
        return f"; this costs {found}, at most {self._limit:g} % is wanted"


class MemorySearch(PlanSearch):
    """Finds the quickest plan under which no rank reserves more than it should.

    Where a rank reserves more than its target, the next plan is made for a target that is lower by
    as much and a little more; where it reserves far less, for a higher one. What was seen to miss
    is not planned for again.
    """

    def __init__(
        self, chooser: Chooser, policy: MemoryTargetConfig, everything: OffloadPlan
    ) -> None:
        num_ranks = len(chooser.without.ranks)
        self._wanted_bytes = self._planned = policy.targets(num_ranks)
        self._least_missed: list[int | None] = [None] * num_ranks
        super().__init__(chooser, policy.measured_plans, replace(everything, measured=None))

    def _first(self) -> OffloadPlan:
        try:
            return self._chooser.under(self._planned)
        except TargetError as error:
            self.said = str(error)
            least_bytes = self._chooser.lowest_bytes
            self._planned = tuple(max(least_bytes, each) for each in self._planned)
            return self._chooser.under(self._planned)

    def _next(self) -> OffloadPlan | None:
        ranks = enumerate(self.plan.ranks)
        targets = tuple(
            self._planned[place]
            if rank.measured_peak_bytes is None
            else self._next_target(place, rank.measured_peak_bytes, rank.moved_bytes)
            for place, rank in ranks
        )
        if targets == self._planned:
            return None
        least_bytes = self._chooser.lowest_bytes
        self._planned = tuple(
            max(each, min(least_bytes, before))
            for each, before in zip(targets, self._planned, strict=True)
        )
        return self._chooser.under(self._planned)

    def _next_target(self, place: int, reserved_bytes: int, moved_bytes: int) -> int:
        planned, wanted = self._planned[place], self._wanted_bytes[place]
        room, least_missed = wanted - reserved_bytes, self._least_missed[place]
        if room < 0:
            self._least_missed[place] = planned
            return planned + room - wanted // _MARGIN_SHARE
        if not moved_bytes or room <= wanted // _SLACK_SHARE:
            return planned
        higher = planned + room - wanted // _MARGIN_SHARE
        if least_missed is not None and higher >= least_missed:
            higher = (planned + least_missed) // 2
            if higher - planned < wanted // _MARGIN_SHARE:
                return planned
        return higher

    def _rating(self, plan: OffloadPlan) -> tuple[float, int]:
        pairs = zip(plan.ranks, self._wanted_bytes, strict=True)
        missed = (max(0, (rank.measured_peak_bytes or 0) - wanted) for rank, wanted in pairs)
        return sum(missed), plan.moved_bytes

    def _promise(self) -> str:
        reserved = [rank.measured_peak_bytes for rank in self.plan.ranks]
        found = (
            "what is reserved is not known"
            if None in reserved
            else f"{_sizes([each or 0 for each in reserved])} are reserved"
        )
        return (
            f"; {found}, at most {_sizes(self._wanted_bytes)} is wanted; this costs "
            f"{self.plan.measured}"
        )


def search_of(
    chooser: Chooser,
    policy: AutoConfig | MemoryTargetConfig,
    cost: MeasuredCost,
    capacity_bytes: int | None,
) -> PlanSearch:
    """Return the search that a policy asks for.

    Args:
        chooser: makes plans.
        policy: what is wanted.
        cost: of the first steps, in which everything has moved.
        capacity_bytes: what a rank can reserve at most, if that is known.
    """
    everything = replace(chooser.plan(ModulesConfig()), policy=policy.kind, measured=cost)
    if isinstance(policy, AutoConfig):
        return CostSearch(chooser, policy, everything, capacity_bytes)
    return MemorySearch(chooser, policy, everything)


def _peak_bytes(plan: OffloadPlan) -> int:
    """Return what the fullest rank is predicted to take."""
    return max(rank.predicted_peak_bytes or 0 for rank in plan.ranks)


def _cost(plan: OffloadPlan) -> float:
    assert plan.measured is not None
    return plan.measured.slowdown_percent


def _what(plan: OffloadPlan) -> str:
    """Say what a plan does."""
    sizes = [(rank.moved_bytes, rank.remade_bytes) for rank in plan.ranks]
    kept = _sizes([rank.saved_bytes - rank.moved_bytes for rank in plan.ranks])
    moved, remade = (_sizes(each) for each in zip(*sizes, strict=True))
    stages = (stage for rank in plan.ranks for stage in rank.recompute or ())
    units = ", ".join(sorted(frozenset[str]().union(*stages)))
    again = f", {remade} are made again ({units})" if units else ""
    return f"{moved} move{again} and {kept} stay"


def _sizes(sizes: Sequence[int]) -> str:
    """Return one size where all are the same."""
    return ", ".join(
        format_bytes(size, 2) for size in (sizes if len(set(sizes)) > 1 else sizes[:1])
    )
