"""The in-flight window: which groups' copies to the host are issued, and when each is released.

Owns the order of release, and the step's clock, the bytes of all groups that the program has
passed: from the first backward on it says when a release is due.

Invariant: the window is released in the order of issue, so one wait covers all before it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.release import Sources

__all__ = ["InFlightWindow"]


class _Entry(NamedTuple):
    group: OffloadGroup
    num_blocks: int
    due_bytes: int


class InFlightWindow:
    """The groups of one manager, from the issue of their copies to the host to their release.

    Args:
        sources: what is released.
        budget: how much device memory copies in flight may hold.
    """

    def __init__(self, sources: Sources, budget: DeviceBudget) -> None:
        self._sources = sources
        self._budget = budget
        self._entries: deque[_Entry] = deque()
        self._passed_bytes = 0
        self._step_began_at_bytes = 0

    def begin_step(self) -> None:
        """Let the step's clock begin at zero."""
        self._step_began_at_bytes = self._passed_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of all groups that this step has passed; its clock."""
        return self._passed_bytes - self._step_began_at_bytes

    @property
    def num_inflight(self) -> int:
        """Groups whose copies are issued and whose sources are still held."""
        return len(self._entries)

    def add(self, group: OffloadGroup, num_blocks: int) -> None:
        """Note a group whose copies were issued."""
        due_bytes = self._passed_bytes + self._budget.limit_bytes
        self._entries.append(_Entry(group, num_blocks, due_bytes))

    def pass_boundary(self, num_bytes: int) -> None:
        """Note that the program has gone by a group of this size; release what is due.

        Under limits that were set nothing is due until the first backward but what exceeds them.
        Where groups stay, the others' copies could take all the room that they have and still be
        due too soon; and a pipeline rank that waits there makes others wait, whose messages it then
        takes late.
        """
        self._passed_bytes += num_bytes
        if self._budget.clock_runs:
            while self._entries and self._entries[0].due_bytes < self._passed_bytes:
                self._release_oldest()
        self.release_over_budget()

    def release_over_budget(self) -> None:
        """Release from the oldest on until the budget is kept."""
        while self._entries and self._budget.is_exceeded():
            self._release_oldest()

    def limit_groups(self, name: str, num_groups: int) -> None:
        """Release from the oldest on until at most ``num_groups`` of this name are in flight."""
        num_over = sum(entry.group.name == name for entry in self._entries) - num_groups
        while num_over > 0:
            num_over -= self._release_oldest().group.name == name

    def limit_blocks(self, num_blocks: int) -> None:
        """Release from the oldest on until at most ``num_blocks`` blocks are in flight."""
        num_over = sum(entry.num_blocks for entry in self._entries) - num_blocks
        while num_over > 0:
            num_over -= self._release_oldest().num_blocks

    def drain(self) -> None:
        """Release everything in flight, in order."""
        while self._entries:
            self._release_oldest()

    def _release_oldest(self) -> _Entry:
        entry = self._entries[0]
        self._sources.release(entry.group)
        self._entries.popleft()
        return entry

    def keep_resident(self, group: OffloadGroup) -> None:
        """Cancel the release of a group whose copies are in flight."""
        self._sources.keep_resident(group)

    def abandon(self) -> None:
        """Hold nothing any more: after a failed step, when no copy is under way."""
        self._entries.clear()
        self._sources.abandon()
