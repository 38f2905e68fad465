"""The plan that saves the most memory at no more than a small share of the step's time.

A lower target moves more, and so takes more time or as much; the search halves the range of targets
between the lowest that can be kept and what a step takes without offload. Where the prediction says
what a slower link would bring, that has to be fast enough as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.memory_target import MemoryPlanner, Resources
from megatron_offload.planning.plan import OffloadPlan

_NUM_TARGETS = 256
"""The range of targets is cut into so many: a search predicts about eight plans."""


class Prediction(NamedTuple):
    """What a plan would bring."""

    step_us: float
    peak_bytes: tuple[int, ...]
    """Most device memory of each pipeline rank, reserved."""
    slow_link_step_us: float | None = None
    """What ``step_us`` would be with less bandwidth than was measured; None where unknown."""

    @property
    def cautious_step_us(self) -> float:
        """The longer of both times."""
        return max(self.step_us, self.slow_link_step_us or 0.0)


Predictor = Callable[[OffloadPlan], Prediction]


_RESOURCES = Resources()


@dataclass(frozen=True)
class AutoPolicy:
    """Takes the most memory off the fullest rank that costs (almost) no time.

    ``most_slowdown_percent`` is of the step's time without offload.
    """

    kind: ClassVar[str] = "auto"

    predict: Predictor
    most_slowdown_percent: float = 0.5
    resources: Resources = _RESOURCES

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks, with what was predicted of it."""
        percent = self.most_slowdown_percent
        return AutoPlanner(profiles, self.predict, percent, self.resources).plan()


class AutoPlanner:
    """Plans one job for one bound of bytes after another.

    Raises:
        ConfigError: a profile is missing, lacks times, or is of a step that moved something.
    """

    def __init__(
        self,
        profiles: Collection[StepProfile],
        predict: Predictor,
        most_slowdown_percent: float,
        resources: Resources = _RESOURCES,
    ) -> None:
        moved_bytes = sum(profile.offloaded_bytes for profile in profiles)
        if moved_bytes:
            raise ConfigError(
                f"the profiled step moved {moved_bytes} bytes, and its times hold what it waited "
                "for them; policy 'auto' needs one that moves nothing, 'memory_target' doesn't"
            )
        self._planner = MemoryPlanner(profiles, resources)
        self._predict = predict
        self._most_slowdown_percent = most_slowdown_percent
        self._found: dict[int, tuple[OffloadPlan, Prediction]] = {}

    def plan(self, most_moved_bytes: int | None = None) -> OffloadPlan:
        """Return the plan of all ranks, with what was predicted of it.

        ``most_moved_bytes`` of a step, over all ranks, is for a run in which a plan took longer.
        """
        best = self._look(_NUM_TARGETS)  # nothing moves
        limit_us = best[1].step_us * (1 + self._most_slowdown_percent / 100)
        too_low, fast = -1, _NUM_TARGETS
        while fast - too_low > 1:
            middle = (too_low + fast) // 2
            plan, prediction = found = self._look(middle)
            may_move = most_moved_bytes is None or plan.moved_bytes <= most_moved_bytes
            if prediction.cautious_step_us <= limit_us and may_move:
                fast = middle
                best = min(found, best, key=lambda each: max(each[1].peak_bytes))
            else:
                too_low = middle
        return with_prediction(*best)

    def _look(self, step: int) -> tuple[OffloadPlan, Prediction]:
        if step not in self._found:
            lowest, highest = self._planner.lowest_bytes, self._planner.highest_bytes
            target = lowest + (highest - lowest) * step // _NUM_TARGETS
            plan = self._planner.plan((target,) * len(self._planner.ranks), AutoPolicy.kind)
            self._found[step] = plan, self._predict(plan)
        return self._found[step]


def with_prediction(plan: OffloadPlan, prediction: Prediction) -> OffloadPlan:
    """Return the plan with what was predicted of it written in."""
    ranks = (
        replace(rank, predicted_peak_bytes=peak_bytes, predicted_step_us=prediction.step_us)
        for rank, peak_bytes in zip(plan.ranks, prediction.peak_bytes, strict=True)
    )
    return replace(plan, ranks=tuple(ranks))
