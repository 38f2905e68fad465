"""How late memory is released and how far ahead it comes back, corrected by what steps show.

Owns a search over steps that begins with a plan's distances. Must not know torch, nor the memory
target, which `megatron_offload.planning.target` follows: both distances together never exceed what
they were allowed.

Each step shows what is worst. Groups that came late, or were waited for, want more prefetch; waits
for copies to the host want a later release; copies that came back before they were released (*early
returns*) held memory for nothing and want an earlier one. One change at a time is tried for one
step, and kept only if that step was better. If it wasn't, it is taken back for good: then it is the
link that is slow, and more memory would be spent for nothing.

Invariants: no distances are tried twice, though a trial that failed is taken back; it ends after a
bounded number of changes, and from then on nothing changes.
Read next: `megatron_offload.planning.plan`, where the first distances stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

__all__ = ["Adaptation", "Distances", "Seen"]

_FACTOR = 1.5
_NUM_QUIET = 3
"""After so many steps in a row with nothing to try, the distances are frozen."""
_MOST_CHANGES = 12
_NOISE = 0.05
"""Stalls that differ by less than this share are the same."""


class Seen(NamedTuple):
    """What a step showed; see `megatron_offload.engine.stats.StepStats`."""

    num_late_reloads: int
    num_early_returns: int
    release_stall_us: float = 0.0
    """How long the compute stream waited for copies to the host; 0 where that isn't measured."""
    reload_stall_us: float = 0.0
    """The same for copies back."""
    missed_bytes: int = 0
    """What the step reserved above what it should have, at most."""

    def is_better_than(self, other: Seen) -> bool:
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


class Distances(NamedTuple):
    """Both in bytes of groups."""

    max_inflight_bytes: int
    """How late memory is released."""
    prefetch_bytes: int
    """How far ahead it comes back."""


class _Change(Enum):
    """What may be tried, in this order."""

    REACH_AHEAD = auto()
    RELEASE_LATER = auto()
    RELEASE_EARLIER = auto()


@dataclass(frozen=True, slots=True)
class _Trial:
    before: Distances
    seen_before: Seen


class Adaptation:
    """Finds the distances with which the least comes late.

    Args:
        distances: those of the plan.
        least_bytes: what each has at least: the largest group, if there is room for two.
        most_bytes: what both have at most together; never more than that is asked for.

    Attributes:
        distances: those for the next step.
        is_frozen: whether the search is over.
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

    def follow(self, seen: Seen) -> Distances:
        """Return the distances for the next step.

        Args:
            seen: what the last step showed, with `distances` in force.
        """
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


def _wanted(seen: Seen) -> list[_Change]:
    """Return what could help against what a step showed."""
    reasons = {
        _Change.REACH_AHEAD: seen.num_late_reloads or seen.reload_stall_us,
        _Change.RELEASE_LATER: seen.release_stall_us,
        _Change.RELEASE_EARLIER: seen.num_early_returns,
    }
    return [change for change in _Change if reasons[change]]
