"""What one training step showed: which groups there were, how large, and when each was reloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GroupKey(NamedTuple):
    """Which group of a step: the same program gives the same keys in every step.

    A key is a hint for prefetching and planning. No tensor is ever found by it.
    """

    chunk: int
    """Position of the chunk among the step's chunks that saved something, in forward order."""
    order: int
    """Position of the group in its chunk, in the order of the group starts."""


class RecomputeUnit(NamedTuple):
    """What a group saves by recipes of one unit, recomputed in its backward."""

    unit: str
    num_bytes: int
    """What is recomputed; 0 where a group before this has counted it."""
    needs: tuple[GroupKey, ...] = ()
    """Other groups that hold what it is made from."""


def merge_units(parts: Sequence[RecomputeUnit]) -> tuple[RecomputeUnit, ...]:
    """Return what a group's tensors give by unit, in the order in which units first come."""
    merged: dict[str, RecomputeUnit] = {}
    for part in parts:
        if one := merged.get(part.unit):
            needs = tuple(sorted({*one.needs, *part.needs}))
            part = one._replace(num_bytes=one.num_bytes + part.num_bytes, needs=needs)
        merged[part.unit] = part
    return tuple(merged.values())


class GroupProfile(NamedTuple):
    """One group of a step."""

    key: GroupKey
    name: str
    num_bytes: int
    """Bytes that offloading the group copies; zero where it holds nothing worth moving."""
    committed_at_bytes: int = 0
    """When its forward ended, by the clock of `StepProfile.backward_at_bytes`."""
    recomputed: tuple[RecomputeUnit, ...] = ()
    """By unit, what it saves that is recomputed."""

    @property
    def needs(self) -> tuple[GroupKey, ...]:
        """The groups whose bytes its backward makes its own from."""
        return tuple(key for unit in self.recomputed for key in unit.needs)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One training step as far as the next needs it."""

    groups: tuple[GroupProfile, ...]
    """In the order of their commits."""
    backward_order: tuple[GroupKey, ...]
    """In the order in which backward reached the groups' ends."""
    backward_at_bytes: tuple[int, ...] = ()
    """When that was, for each of them: the bytes of all groups that the step had seen by then, in
    forward and in backward. A clock that is the same in every run and costs nothing to read."""

    def has_groups_of(self, other: StepProfile) -> bool:
        """Whether both steps had the same groups in the same places, of whatever sizes."""
        if self is other:
            return True
        places, others = ([(one.key, one.name) for one in it.groups] for it in (self, other))
        return places == others
