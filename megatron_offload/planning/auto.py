"""The plan that saves the most memory at no more than a small share of the step's time.

Owns the search over memory targets, and the correction of predictions by what was measured. Must
not know how a target becomes a plan, how a plan's time is predicted, nor how one is measured.

A lower target moves more, and so takes more time or as much; the search halves the range of
targets between the lowest that can be kept and what a step takes without offload. Where a
prediction doesn't follow that rule, the answer is the best of the plans that were looked at.

What a measured plan took longer than predicted is taken to grow with the bytes that a plan moves,
and added to every prediction. So no plan that was measured to be too slow comes out again. Where
the gap really grows faster than the bytes, as when a link fills up, the first new plan keeps to the
limit.

Invariants: same input, same plan; a plan that is returned was predicted to be fast enough.
Read next: `megatron_offload.planning.predict`, which predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from megatron_offload.planning.memory_target import MemoryPlanner, Resources
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.profile import StepProfile

__all__ = ["AutoPolicy", "Prediction", "Predictor"]

_NUM_TARGETS = 256
"""The range of targets is cut into so many: a search predicts about eight plans."""


class Prediction(NamedTuple):
    """What a plan would bring."""

    step_us: float
    peak_bytes: tuple[int, ...]
    """Most device memory of each pipeline rank, reserved."""


Predictor = Callable[[OffloadPlan], Prediction]


_RESOURCES = Resources()


@dataclass(frozen=True)
class AutoPolicy:
    """Takes the most memory off the fullest rank that costs (almost) no time.

    Attributes:
        predict: what tells the time of a plan.
        most_slowdown_percent: of the step's time without offload.
        resources: what the plan may use.
        measured: plans that the run has followed, with what they were `measured` to cost.
    """

    kind: ClassVar[str] = "auto"

    predict: Predictor
    most_slowdown_percent: float = 0.5
    resources: Resources = _RESOURCES
    measured: tuple[OffloadPlan, ...] = ()

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks, with what was predicted of it.

        Raises:
            ConfigError: a profile is missing, or lacks times.
        """
        planner = MemoryPlanner(profiles, self.resources)
        lowest, highest = planner.lowest_bytes, planner.highest_bytes
        us_per_byte = 0.0

        def look(step: int) -> tuple[OffloadPlan, Prediction]:
            target = lowest + (highest - lowest) * step // _NUM_TARGETS
            plan = planner.plan((target,) * len(planner.ranks), self.kind)
            predicted = self.predict(plan)
            more_us = us_per_byte * plan.moved_bytes
            return plan, predicted._replace(step_us=predicted.step_us + more_us)

        best = look(_NUM_TARGETS)  # nothing moves
        limit_us = best[1].step_us * (1 + self.most_slowdown_percent / 100)
        us_per_byte = self._unpredicted_us_per_byte(best[1].step_us)
        too_low, fast = -1, _NUM_TARGETS
        while fast - too_low > 1:
            middle = (too_low + fast) // 2
            found = look(middle)
            if found[1].step_us <= limit_us:
                fast = middle
                best = min(found, best, key=lambda each: max(each[1].peak_bytes))
            else:
                too_low = middle
        return with_prediction(*best)

    def _unpredicted_us_per_byte(self, without_us: float) -> float:
        """Return what measured plans took longer than predicted, at most, by the bytes they move.

        Args:
            without_us: predicted step without offload, of which measured slowdowns are taken.
        """
        most_us = 0.0
        for plan in self.measured:
            assert plan.measured is not None
            really_us = without_us * (1 + plan.measured.slowdown_percent / 100)
            most_us = max(most_us, (really_us - self.predict(plan).step_us) / plan.moved_bytes)
        return most_us


def with_prediction(plan: OffloadPlan, prediction: Prediction) -> OffloadPlan:
    """Return the plan with what was predicted of it written in."""
    ranks = (
        replace(rank, predicted_peak_bytes=peak_bytes, predicted_step_us=prediction.step_us)
        for rank, peak_bytes in zip(plan.ranks, prediction.peak_bytes, strict=True)
    )
    return replace(plan, ranks=tuple(ranks))
