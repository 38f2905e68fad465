"""The plan that saves the most memory at no more than a small share of the step's time.

Owns the search over memory targets. Must not know how a target becomes a plan, nor how a plan's
time is predicted or measured.

A lower target moves more, and so takes more time or as much; the search halves the range of
targets between the lowest that can be kept and what a step takes without offload. Where a
prediction doesn't follow that rule, the answer is the best of the plans that were looked at.

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
        most_moved_bytes: of a step, over all ranks; None for any. For a run in which a plan took
            longer than predicted.
    """

    kind: ClassVar[str] = "auto"

    predict: Predictor
    most_slowdown_percent: float = 0.5
    resources: Resources = _RESOURCES
    most_moved_bytes: int | None = None

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks, with what was predicted of it.

        Raises:
            ConfigError: a profile is missing, or lacks times.
        """
        planner = MemoryPlanner(profiles, self.resources)
        lowest, highest = planner.lowest_bytes, planner.highest_bytes

        def look(step: int) -> tuple[OffloadPlan, Prediction]:
            target = lowest + (highest - lowest) * step // _NUM_TARGETS
            plan = planner.plan((target,) * len(planner.ranks), self.kind)
            return plan, self.predict(plan)

        best = look(_NUM_TARGETS)  # nothing moves
        limit_us = best[1].step_us * (1 + self.most_slowdown_percent / 100)
        too_low, fast = -1, _NUM_TARGETS
        while fast - too_low > 1:
            middle = (too_low + fast) // 2
            found = look(middle)
            if found[1].step_us <= limit_us and self._may_move(found[0].moved_bytes):
                fast = middle
                best = min(found, best, key=lambda each: max(each[1].peak_bytes))
            else:
                too_low = middle
        return with_prediction(*best)

    def _may_move(self, num_bytes: int) -> bool:
        return self.most_moved_bytes is None or num_bytes <= self.most_moved_bytes


def with_prediction(plan: OffloadPlan, prediction: Prediction) -> OffloadPlan:
    """Return the plan with what was predicted of it written in."""
    ranks = (
        replace(rank, predicted_peak_bytes=peak_bytes, predicted_step_us=prediction.step_us)
        for rank, peak_bytes in zip(plan.ranks, prediction.peak_bytes, strict=True)
    )
    return replace(plan, ranks=tuple(ranks))
