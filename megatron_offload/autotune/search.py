"""From what the steps of a plan have shown to the next plan, and to the final one."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.profile import kind_of
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import TargetError
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan, RankPlan
from megatron_offload.planning.replay import OutOfTimeError, ending_after

MOST_PLANNING_S = 10.0

_MARGIN_SHARE = 96  # targets that differ by less are the same; so much is left to spare
_AIM_SHARE = 0.9  # of what a step may cost, so that a plan that costs a little more is kept
_HOST_BOUND = "; steps are CPU-bound, a CUDA graph of the whole step is not (docs/cuda_graphs.md)"


class PlanSearch(ABC):
    """Asks a chooser for few plans, one after the other, until one is final.

    Attributes:
        plan: what is to be followed; at first nothing is offloaded.
        is_converged: whether it is final.
        is_kept: whether it keeps what was promised.
        said: what there is to say of it, for people.
        left_s: what planning may take yet of a core's time.
        for_replays: whether steps will be replays of a graph, in which the host takes no time.
    """

    _gives_up = False
    """Whether nothing is offloaded where the best breaks its promise."""

    def __init__(self, chooser: Chooser, policy: AutoConfig | MemoryTargetConfig) -> None:
        self._chooser, self._kind = chooser, policy.kind
        self.plan = self._under(chooser.highest_bytes)
        self.is_converged, self.is_kept, self.said = False, True, ""
        self._num_left = policy.measured_plans
        self.left_s = MOST_PLANNING_S
        self._tried: list[OffloadPlan] = []
        self.for_replays = self._is_host_bound = self._predicts = False

    def note(
        self,
        cost: MeasuredCost,
        reserved_bytes: Sequence[int | None],
        *,
        is_host_bound: bool = False,
    ) -> None:
        """Take what a step that follows the plan has shown, and what each rank reserves.

        ``is_host_bound`` says that the device has waited for the host: of what replays cost such a
        step says nothing, so that it is predicted.
        """
        if is_host_bound and self.for_replays:
            self._predicts = True
            without_us = self._chooser.without.step_us
            lost_us = without_us * self._chooser.slowdown_percent(self.plan) / 100
            cost, is_host_bound = MeasuredCost(without_us + lost_us, lost_us), False
        pairs = zip(self.plan.ranks, reserved_bytes, strict=True)
        ranks = tuple(replace(rank, measured_peak_bytes=most) for rank, most in pairs)
        self.plan = replace(self.plan, ranks=ranks, measured=cost)
        self._is_host_bound |= is_host_bound
        self._tried.append(self.plan)
        is_first = len(self._tried) == 1
        plan, began_s = None, time.thread_time()
        if is_first or self._num_left:
            with contextlib.suppress(OutOfTimeError), ending_after(self.left_s):
                plan = self._next()
        self.left_s -= time.thread_time() - began_s
        if plan is None or any(map(plan.is_like, self._tried)):
            self.is_converged = True
            self.plan = min(self._tried, key=self._rating)  # the best that was measured
            self.is_kept = not self._rating(self.plan)[0]
            promise = self._promise()
            if not self.is_kept and self._gives_up:
                self.plan = self._under(self._chooser.highest_bytes)
            if self._predicts:
                promise, self.plan = f"{promise}, as predicted", replace(self.plan, measured=None)
            if self._is_host_bound:  # not in replays
                promise += _HOST_BOUND
            self.said = f"{_what(self.plan)}{promise}"
            return
        self.plan = plan
        if is_first and not (self._num_left and plan.does_something):
            self.is_converged, self.said = True, f"{_what(plan)}, as predicted"
        self._num_left -= 1

    def least_cost(self) -> str:
        """Return in words what the least costly plan costs that does anything."""
        tried = [plan for plan in self._tried if plan.does_something]
        if tried:
            return f"the least costly plan that was tried costs {min(tried, key=_cost).measured}"
        highest_bytes = self._chooser.highest_bytes
        with contextlib.suppress(OutOfTimeError, TargetError), ending_after(self.left_s):
            plan = self._under(highest_bytes - highest_bytes // 32)
            percent = self._chooser.slowdown_percent(plan)
            return f"a plan that frees a little is predicted to cost {percent:.3g} %"
        return "no plan was found in the time that planning may take"

    def _under(self, target_bytes: int) -> OffloadPlan:
        targets = (max(self._chooser.lowest_bytes, target_bytes),) * len(
            self._chooser.without.ranks
        )
        return replace(self._chooser.under(targets), policy=self._kind)

    @abstractmethod
    def _next(self) -> OffloadPlan | None:
        """Return another plan to try, None where that brings nothing."""

    @abstractmethod
    def _rating(self, plan: OffloadPlan) -> tuple[float, ...]:
        """Return by how much a plan breaks its promise, and what is compared besides; less wins."""

    @abstractmethod
    def _promise(self) -> str:
        """Return what was wanted, in words."""


class CostSearch(PlanSearch):
    """Finds the plan that reserves least and costs no more of the step's time than it may.

    What a plan costs is less or more than was predicted. Between plans that were measured the one
    is taken to grow evenly with the other; beyond them, just as fast. Where none was quick enough,
    the last is found without predictions: cost is taken to grow evenly with what is freed. It grows
    faster the less memory is left, so that is quick enough.
    """

    def __init__(
        self, chooser: Chooser, policy: AutoConfig, capacity_bytes: float, most_freed_bytes: float
    ) -> None:
        super().__init__(chooser, policy)
        self._limit = policy.most_slowdown_percent
        self._capacity_bytes = capacity_bytes
        self._least_bytes = min(capacity_bytes, chooser.highest_bytes - most_freed_bytes)
        self._gives_up = chooser.highest_bytes <= capacity_bytes

    def _next(self) -> OffloadPlan | None:
        chooser, tried = self._chooser, self._tried
        asked, step, most = self._between([chooser.slowdown_percent(plan) for plan in tried])
        did_well = any(plan.does_something for plan in filter(self._is_quick, tried))
        can_predict = did_well or self._num_left != 1 or len(tried) == 1
        for more in (step, 2 * step, 4 * step) if can_predict else ():
            if asked + more >= most:
                break
            plan = self._fitting(chooser.within(max(0.0, asked + more)))
            if self._is_better(plan):
                return plan
        freed, more, most = self._between([chooser.highest_bytes - _peak_bytes(p) for p in tried])
        plan = self._fitting(self._under(chooser.highest_bytes - int(freed + more)))
        return plan if most < math.inf and self._is_better(plan) else None

    def _between(self, amounts: Sequence[float]) -> tuple[float, float, float]:
        """Return the most that was quick enough, how much more to try, and what was too much.

        ``amounts`` says of each plan that was measured how much it does; nothing costs nothing.
        """
        points = [(0.0, 0.0), *zip(amounts, map(_cost, self._tried), strict=True)]
        quick = max(point for point in points if point[1] <= self._limit)
        slow = min((one for one in points if one[1] > self._limit and one > quick), default=None)
        more = _AIM_SHARE * self._limit - quick[1]
        if slow is None:
            return quick[0], more, math.inf
        return quick[0], more * (slow[0] - quick[0]) / (slow[1] - quick[1]), slow[0]

    def _fitting(self, plan: OffloadPlan) -> OffloadPlan:
        """Return the plan, or one that the device can hold, or for which less is to be pinned."""
        if self._least_bytes <= _peak_bytes(plan) <= self._capacity_bytes:
            return plan
        is_too_large = _peak_bytes(plan) > self._capacity_bytes
        return self._under(int(self._capacity_bytes if is_too_large else self._least_bytes))

    def _is_better(self, plan: OffloadPlan) -> bool:
        """Whether it is new, and takes less than those that were quick enough."""
        if any(map(plan.is_like, self._tried)):
            return False
        margin_bytes = self._chooser.highest_bytes // _MARGIN_SHARE
        quick = filter(self._is_quick, self._tried)
        return all(_peak_bytes(plan) <= _peak_bytes(one) - margin_bytes for one in quick)

    def _is_quick(self, plan: OffloadPlan) -> bool:
        return _cost(plan) <= self._limit

    def _rating(self, plan: OffloadPlan) -> tuple[float, ...]:
        reserved = [rank.measured_peak_bytes or 0 for rank in plan.ranks]
        most_bytes = max(reserved) if all(reserved) else _peak_bytes(plan)
        if _peak_bytes(plan) > self._capacity_bytes:
            return math.inf, most_bytes
        return (0.0 if self._is_quick(plan) else _cost(plan)), most_bytes

    def _promise(self) -> str:
        would = "this costs" if self.is_kept else "the quickest that was tried costs"
        return f"; {would} {self.plan.measured}, at most {self._limit:g} % is wanted"


class MemorySearch(PlanSearch):
    """Finds the quickest plan under which no rank reserves more than it should.

    Where a rank reserves more than its target, the next plan is made for a target that is lower by
    as much and a little more; where it reserves far less, for a higher one. What was seen to miss
    is not planned for again.
    """

    def __init__(
        self, chooser: Chooser, policy: MemoryTargetConfig, capacity_bytes: int | None
    ) -> None:
        super().__init__(chooser, policy)
        num_ranks = len(self.plan.ranks)
        most_bytes = max(chooser.lowest_bytes, capacity_bytes or sys.maxsize)
        wanted = policy.targets(num_ranks)
        self._wanted_bytes = self._planned = tuple(min(each, most_bytes) for each in wanted)
        self._least_missed: list[int | None] = [None] * num_ranks

    def _next(self) -> OffloadPlan | None:
        targets = self._planned
        if len(self._tried) > 1:
            targets = tuple(map(self._next_target, range(len(targets)), self.plan.ranks))
            if targets == self._planned:
                return None
        self._planned = targets
        try:
            return self._chooser.under(targets)
        except TargetError:
            self._planned = tuple(max(each, self._chooser.lowest_bytes) for each in targets)
            return self._chooser.under(self._planned)

    def _next_target(self, place: int, rank: RankPlan) -> int:
        planned, wanted = self._planned[place], self._wanted_bytes[place]
        if rank.measured_peak_bytes is None:
            return planned
        room, least_missed = wanted - rank.measured_peak_bytes, self._least_missed[place]
        if room < 0:
            self._least_missed[place] = planned
            return planned + room - wanted // _MARGIN_SHARE
        if not rank.moved_bytes or room <= wanted // 48:  # else it may reserve more
            return planned
        higher = planned + room - wanted // _MARGIN_SHARE
        if least_missed is not None and higher >= least_missed:
            higher = (planned + least_missed) // 2
            if higher - planned < wanted // _MARGIN_SHARE:
                return planned
        return higher

    def _rating(self, plan: OffloadPlan) -> tuple[float, ...]:
        pairs = zip(plan.ranks, self._wanted_bytes, strict=True)
        missed = (max(0, (rank.measured_peak_bytes or 0) - wanted) for rank, wanted in pairs)
        return sum(missed), _cost(plan), plan.moved_bytes

    def _promise(self) -> str:
        reserved = [rank.measured_peak_bytes for rank in self.plan.ranks]
        found = _sizes([each or 0 for each in reserved]) if all(reserved) else "unknown sizes"
        return (
            f"; {found} are reserved, at most {_sizes(self._wanted_bytes)} is wanted; this costs "
            f"{self.plan.measured}"
        )


def search_of(
    chooser: Chooser,
    policy: AutoConfig | MemoryTargetConfig,
    capacity_bytes: int | None,
    most_freed_bytes: float = math.inf,
) -> PlanSearch:
    """Return the search that a policy asks for.

    ``auto`` frees no more than it may, as pinning takes time. A rank can reserve ``capacity_bytes``
    at most.
    """
    if isinstance(policy, AutoConfig):
        most_bytes = math.inf if capacity_bytes is None else capacity_bytes
        return CostSearch(chooser, policy, most_bytes, most_freed_bytes)
    return MemorySearch(chooser, policy, capacity_bytes)


def _peak_bytes(plan: OffloadPlan) -> int:
    return max(rank.predicted_peak_bytes or 0 for rank in plan.ranks)


def _cost(plan: OffloadPlan) -> float:
    assert plan.measured is not None
    return plan.measured.slowdown_percent


def _what(plan: OffloadPlan) -> str:
    moved = _sizes([rank.moved_bytes for rank in plan.ranks])
    kept = _sizes([rank.saved_bytes - rank.moved_bytes for rank in plan.ranks])
    recomputed = [rank.recomputed_bytes for rank in plan.ranks]
    stages = (stage for rank in plan.ranks for stage in rank.recompute or ())
    units = ", ".join(sorted({kind_of(unit) for stage in stages for unit in stage}))
    names = f" ({units})" if units else ""
    again = f", {_sizes(recomputed)} are recomputed{names}" if any(recomputed) else ""
    return f"{moved} are offloaded{again} and {kept} kept"


def _sizes(sizes: Sequence[int]) -> str:
    """Return one size where all are the same."""
    shown = sizes if len(set(sizes)) > 1 else sizes[:1]
    return ", ".join(format_bytes(size, 2) for size in shown)
