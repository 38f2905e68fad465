"""What one training step showed: which groups there were, how large, and when each was reloaded."""

from __future__ import annotations

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


class GroupProfile(NamedTuple):
    """One group of a step."""

    key: GroupKey
    name: str
    num_bytes: int
    """Bytes that offloading the group copies; zero where it holds nothing worth a copy."""
    committed_at_bytes: int = 0
    """When its forward ended, by the clock of `StepProfile.backward_at_bytes`."""
    needs: tuple[GroupKey, ...] = ()
    """Other groups whose bytes its backward makes its own from."""


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
        places, others = ([(one.key, one.name) for one in it.groups] for it in (self, other))
        return places == others
