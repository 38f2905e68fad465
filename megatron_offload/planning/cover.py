"""Which groups of one rank must move, so that its memory keeps a target: the problem itself.

Intervals, each with its bytes, cover *rows* of the step's time between the boundaries of groups.
Bytes are integers, so that a choice keeps a target or doesn't. "What the solver assumes" in
docs/planning.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_offload.errors import ConfigError


class Item(NamedTuple):
    """A group that may move."""

    num_bytes: int
    first_row: int
    """The row behind its commit, the first that it may be away in."""
    end_row: int
    """The row in which its backward has begun; it may be away in those before."""
    committed_us: float
    backward_us: float


@dataclass(frozen=True)
class Problem:
    """One rank's step.

    Attributes:
        items: the groups that may move at all.
        memory_bytes: most device memory in each row, without offload.
        target_bytes: most that any row should have.
        device_bytes: what moved groups may take between commit and backward, all together.
        link_gbps: what copies get each way while both directions are busy, in 10^9 bytes a second.
    """

    items: tuple[Item, ...]
    memory_bytes: tuple[int, ...]
    target_bytes: int
    device_bytes: int
    link_gbps: float

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Positions of the items that have the time to go and come back."""
        bytes_per_us = self.link_gbps * 1e3
        return tuple(
            position
            for position, item in enumerate(self.items)
            if item.num_bytes > 0
            and item.first_row < item.end_row
            and (item.backward_us - item.committed_us) * bytes_per_us >= 2 * item.num_bytes
        )

    @cached_property
    def demand_bytes(self) -> np.ndarray:
        """What must move of what is live in each row; 0 where nothing need."""
        over = np.array(self.memory_bytes, dtype=np.int64) - self.target_bytes
        return np.where(over > 0, over + self.device_bytes, 0)

    def bytes_of(self, positions: Iterable[int]) -> int:
        """Return what the items at these positions hold together."""
        return sum(self.items[position].num_bytes for position in positions)

    def live_bytes(self, positions: Iterable[int]) -> np.ndarray:
        """Return what the items at these positions hold in each row."""
        changes = np.zeros(len(self.memory_bytes) + 1, dtype=np.int64)
        for position in positions:
            item = self.items[position]
            changes[item.first_row] += item.num_bytes
            changes[item.end_row] -= item.num_bytes
        return np.cumsum(changes[:-1])

    def peak_bytes(self, moved: Iterable[int]) -> int:
        """Return the most memory of any row when the items at these positions move."""
        away = np.maximum(self.live_bytes(moved) - self.device_bytes, 0)
        memory = np.array(self.memory_bytes, dtype=np.int64)
        return int((memory - away).max(initial=0))

    def least_peak_bytes(self) -> int:
        """Return the lowest target that can be kept: everything movable moves."""
        return self.peak_bytes(self.movable)

    def check(self) -> None:
        """Raise `ConfigError`, which says by how much, where no choice keeps the target."""
        least_bytes = self.least_peak_bytes()
        if least_bytes > self.target_bytes:
            raise ConfigError(
                f"a target of {self.target_bytes} bytes can't be kept: with all on the host that "
                f"can move in time, the step still takes {least_bytes} bytes, "
                f"{least_bytes - self.target_bytes} more"
            )


class Solution(NamedTuple):
    """Positions of the items that move, and how they were found.

    ``method`` is ``"exact"``, ``"greedy"``, or ``"best found"`` of a search that came to no end.
    """

    moved: frozenset[int]
    moved_bytes: int
    method: str

    @classmethod
    def of(cls, problem: Problem, moved: Iterable[int], method: str) -> Solution:
        """Return the solution that moves the items at these positions."""
        chosen = frozenset(moved)
        return cls(chosen, problem.bytes_of(chosen), method)
