"""A plan's distances (how late memory goes, how far ahead it comes back), corrected by steps.

Each rank corrects its own; no bit depends on them. Both together never exceed those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from megatron_offload.backends.base import Wait
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.measure import WeighedStep, can_weigh, weigh_step
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.planning.plan import Distances, OffloadPlan, with_distances

_FACTOR = 1.5
_NUM_QUIET = 3
"""After so many steps in a row with nothing to try, the distances are frozen."""
_MOST_CHANGES = 12
_NOISE = 0.05
"""Stalls that differ by less than this share are the same."""


class StepObservation(NamedTuple):
    """What a step showed; see `megatron_offload.engine.stats.StepStats`."""

    num_late_reloads: int
    num_early_returns: int
    release_stall_us: float = 0.0
    """How long the compute stream waited for copies to the host; 0 where that isn't measured."""
    reload_stall_us: float = 0.0
    """The same for copies back."""
    missed_bytes: int = 0
    """What the step reserved above what it should have, at most."""

    def is_better_than(self, other: StepObservation) -> bool:
        """Whether more is right, the first of these that differs.

        No more memory than wanted; nothing late; nothing waited for; nothing back early.
        """
        if self.missed_bytes != other.missed_bytes:
            return self.missed_bytes < other.missed_bytes
        if self.num_late_reloads != other.num_late_reloads:
            return self.num_late_reloads < other.num_late_reloads
        own_us = self.release_stall_us + self.reload_stall_us
        others_us = other.release_stall_us + other.reload_stall_us
        if abs(own_us - others_us) > _NOISE * max(own_us, others_us):
            return own_us < others_us
        return self.num_early_returns < other.num_early_returns


class _Change(Enum):
    """What may be tried, in this order."""

    REACH_AHEAD = auto()
    RELEASE_LATER = auto()
    RELEASE_EARLIER = auto()


@dataclass(frozen=True, slots=True)
class _Trial:
    before: Distances
    seen_before: StepObservation


class Adaptation:
    """Finds the distances with which the least comes late.

    Args:
        distances: those of the plan.
        least_bytes: what each has at least: the largest group, if there is room for two.
        most_bytes: what both have at most together; never more than that is asked for.
    """

    def __init__(self, distances: Distances, least_bytes: int, most_bytes: int) -> None:
        self.distances = distances
        self.is_frozen = False
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._trial: _Trial | None = None
        self._tried = {distances}
        self._num_quiet = 0

    @property
    def best(self) -> Distances:
        """The best distances that were seen; those of a trial that is under way were not."""
        return self._trial.before if self._trial is not None else self.distances

    def follow(self, seen: StepObservation) -> Distances:
        """Return the distances for the next step, from what the last showed with `distances`."""
        if self.is_frozen:
            return self.distances
        trial, self._trial = self._trial, None
        if trial is not None and not seen.is_better_than(trial.seen_before):
            self.distances, seen = trial.before, trial.seen_before
        for change in _wanted(seen):
            distances = self._changed(change)
            if distances not in self._tried and len(self._tried) <= _MOST_CHANGES:
                self._trial = _Trial(self.distances, seen)
                self._tried.add(distances)
                self._num_quiet = 0
                self.distances = distances
                return distances
        self._num_quiet += 1
        self.is_frozen = self._num_quiet >= _NUM_QUIET
        return self.distances

    def _changed(self, change: _Change) -> Distances:
        """Return the distances after a change; where room is wanting, the other gives some."""
        inflight, prefetch = self.distances
        least, most = self._least_bytes, self._most_bytes
        if change is _Change.REACH_AHEAD:
            prefetch = max(prefetch, min(self._farther(prefetch), most - least))
            inflight = min(inflight, most - prefetch)
        elif change is _Change.RELEASE_LATER:
            inflight = max(inflight, min(self._farther(inflight), most - least))
            prefetch = min(prefetch, most - inflight)
        else:
            inflight = min(inflight, max(int(inflight / _FACTOR), least))
        return Distances(inflight, prefetch)

    def _farther(self, distance_bytes: int) -> int:
        """Return a larger distance, with room for one more group: less would change nothing."""
        num_groups = distance_bytes // self._least_bytes if self._least_bytes else 0
        # One group may go or come whatever the distance is.
        return max(int(distance_bytes * _FACTOR), (max(num_groups, 1) + 1) * self._least_bytes)


def _wanted(seen: StepObservation) -> list[_Change]:
    """Return what could help against what a step showed."""
    reasons = {
        _Change.REACH_AHEAD: seen.num_late_reloads or seen.reload_stall_us,
        _Change.RELEASE_LATER: seen.release_stall_us,
        _Change.RELEASE_EARLIER: seen.num_early_returns,
    }
    return [change for change in _Change if reasons[change]]


class PlanCorrection:
    """Corrects the distances in force, one step at a time; nothing else may set them meanwhile.

    Args:
        manager: follows a plan.
        num_steps: to look at, behind a first one, in which the plan's host memory gets pinned.
        target_bytes: most that this process should reserve; None for any.
    """

    def __init__(
        self, manager: PipelineOffloadManager, num_steps: int, target_bytes: int | None = None
    ) -> None:
        budget = manager.budget
        distances = Distances(budget.max_inflight_bytes, budget.prefetch_bytes)
        largest_bytes, most_bytes = budget.bounds_bytes()[0] // 2, sum(distances)
        self._manager = manager
        self._search = Adaptation(distances, min(largest_bytes, most_bytes // 2), most_bytes)
        self._target_bytes = target_bytes if can_weigh(manager) else None
        self._num_steps_left = 1 + num_steps if num_steps else 0
        self._is_first = True

    @property
    def is_over(self) -> bool:
        """Whether all steps were taken, and the best distances that they showed are in force."""
        return self._num_steps_left == 0

    @property
    def distances(self) -> Distances:
        """The best distances that were seen."""
        return self._search.best

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look at the step that is taken inside, its ``reset`` included, and correct."""
        if self._is_first or self._search.is_frozen:
            yield
        else:
            with self._weighing() as weighed, trace_step(self._manager) as trace:
                yield
            stall_us, stats = trace.summary().stall_us, self._manager.last_step
            seen = StepObservation(
                stats.num_late_reloads,
                stats.num_early_returns,
                stall_us.get(Wait.W2.name, 0.0),
                stall_us.get(Wait.W4.name, 0.0),
                max(0, weighed.reserved_bytes - (self._target_bytes or 0)) if weighed else 0,
            )
            self._manager.budget.follow_plan(*self._search.follow(seen))
        self._is_first = False
        self._num_steps_left -= 1
        if self.is_over:
            self._manager.budget.follow_plan(*self._search.best)

    def _weighing(self) -> AbstractContextManager[WeighedStep | None]:
        if self._target_bytes is None:
            return nullcontext()
        return weigh_step(self._manager, empties=True)


@dataclass
class DistanceCheck:
    """Corrects the distances of a plan, and has it say so; see `PlanCorrection`."""

    manager: PipelineOffloadManager
    num_steps: int
    target_bytes: int | None
    gather: Callable[[Distances], Sequence[Distances]]
    """Tells every pipeline rank's distances to all, in order; collective."""

    plan: OffloadPlan = field(init=False)
    _correction: PlanCorrection | None = None

    def begin(self, plan: OffloadPlan) -> bool:
        """Take a plan; return whether there is a step to take."""
        self.plan = plan
        self._correction = PlanCorrection(self.manager, self.num_steps, self.target_bytes)
        return not self._correction.is_over

    def step(self) -> AbstractContextManager[None]:
        """Look at the step that is taken inside, and correct."""
        assert self._correction is not None
        return self._correction.step()

    def note(self) -> tuple[bool, str]:
        """Return whether it is over, and which ranks have other distances then; collective then."""
        correction, before = self._correction, self.plan
        assert correction is not None
        if not correction.is_over:
            return False, ""
        self.plan = with_distances(before, self.gather(correction.distances))
        pairs = zip(before.ranks, self.plan.ranks, strict=True)
        changed = [str(rank) for rank, (old, new) in enumerate(pairs) if old != new]
        text = f"distances corrected on pipeline ranks {', '.join(changed)}" if changed else ""
        return True, text
