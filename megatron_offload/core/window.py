"""The in-flight window: which groups' copies to the host are issued, and when each is released.

Owns the step's clock, which says from the first backward on when a release is due. The window is
released in the order of issue, so one wait covers all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import OFFLOADING, ON_HOST, Group

G = TypeVar("G", bound=Group)


class InFlightWindow(Generic[G]):
    """The groups of one rank, from the issue of their copies to the host to their release.

    Args:
        release: makes the compute stream wait for a group's copies, and frees what they read.
        budget: how much device memory copies in flight may hold.
    """

    def __init__(self, release: Callable[[G], None], budget: DeviceBudget) -> None:
        self._release = release
        self._budget = budget
        self._entries: deque[tuple[G, int, int]] = deque()
        """Group, blocks that are copied, and the reading of the clock behind which it is due."""
        self.step_bytes = 0
        """Bytes of all groups that this step has passed; its clock."""
        self.layer_bytes = 0
        """By how much that went on in the last layer that has groups."""
        self._past_bytes = 0
        """Of the steps before."""

    def begin_step(self) -> None:
        """Let the step's clock begin at zero."""
        self._past_bytes += self.step_bytes
        self.step_bytes = 0

    @property
    def num_inflight(self) -> int:
        """Groups whose copies are issued and whose sources are still held."""
        return len(self._entries)

    def __iter__(self) -> Iterator[G]:
        """Yield them, from the oldest on."""
        return (group for group, _, _ in self._entries)

    def add(self, group: G, num_bytes: int, num_blocks: int = 1) -> None:
        """Note a group of which copies of so many bytes were issued."""
        group.advance(OFFLOADING)
        group.inflight_bytes = num_bytes
        self._budget.inflight_bytes += num_bytes
        due_bytes = self._past_bytes + self.step_bytes + self._budget.total_bytes
        self._entries.append((group, num_blocks, due_bytes))

    def pass_boundary(self, num_bytes: int) -> None:
        """Note that the program has gone by a group of this size; release what is due."""
        # [Note: what is due in the first forwards] Under limits that were set, nothing but what
        # exceeds them. Where groups are kept, the others' copies could take all the room that they
        # have and still be due too soon; and a pipeline rank that waits there makes others wait,
        # whose messages it then takes late. Under default limits copies are due there too, or a
        # small share would never be released.
        self.step_bytes += num_bytes
        entries = self._entries
        if entries:
            if self._budget.clock_runs:
                now_bytes = self._past_bytes + self.step_bytes
                while entries and entries[0][2] < now_bytes:
                    self._release_oldest()
            self.release_over_budget()

    def release_over_budget(self) -> None:
        """Release from the oldest on until the budget is kept."""
        while self._entries and self._budget.is_exceeded():
            self._release_oldest()

    def limit(self, most: int, count: Callable[[G, int], int]) -> None:
        """Release from the oldest on until no more are in flight, counted by group and blocks."""
        while sum(count(group, num_blocks) for group, num_blocks, _ in self._entries) > most:
            self._release_oldest()

    def drain(self) -> None:
        """Release everything in flight, in order."""
        while self._entries:
            self._release_oldest()

    def _release_oldest(self) -> None:
        group = self._entries[0][0]
        group.land(group.inflight_bytes)
        self._release(group)
        if group.state is OFFLOADING:
            group.advance(ON_HOST)
        self._entries.popleft()

    def abandon(self) -> None:
        """Forget everything in flight: after a failed step, when no copy is under way."""
        self._entries.clear()
        self._budget.inflight_bytes = 0
