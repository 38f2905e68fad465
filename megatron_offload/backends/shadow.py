"""Who used which bytes last, and what two uses that nothing orders are called.

Whether one access is ordered after another, `megatron_offload.backends.simulated` decides.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from megatron_offload.backends.base import Wait


class Access(NamedTuple):
    """One use of a region of memory, numbered in the order of the calls."""

    order: int
    stream: str
    writes: bool
    label: str

    def __str__(self) -> str:
        return f"{self.stream} {'write' if self.writes else 'read'} [{self.label}] (#{self.order})"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two accesses of the same bytes that nothing orders, and the wait that would have."""

    wait: Wait
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return (
            f"{self.wait.name} is missing: {self.wait.value}: "
            f"{self.later} is not ordered after {self.earlier}"
        )


class Shadow:
    """Who used which bytes of one memory last: disjoint intervals, sorted by address.

    A write that is ordered after all earlier accesses replaces them, which keeps the map small. Of
    one stream's reads (or writes) the newest stands for all.
    """

    __slots__ = ("_ends", "_starts", "_uses")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._uses: list[dict[tuple[str, bool], Access]] = []

    def _cut(self, start: int, end: int) -> tuple[int, int]:
        """Split intervals at both borders; return the index range that lies within."""
        for border in (start, end):
            at = bisect_right(self._starts, border) - 1
            if at >= 0 and self._starts[at] < border < self._ends[at]:
                self._starts.insert(at + 1, border)
                self._ends.insert(at + 1, self._ends[at])
                self._uses.insert(at + 1, dict(self._uses[at]))
                self._ends[at] = border
        first = bisect_right(self._starts, start - 1)
        return first, bisect_right(self._starts, end - 1)

    def earlier_uses(self, start: int, end: int) -> list[Access]:
        """Return the accesses on record for ``[start, end)``, oldest first."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_right(self._starts, end - 1)
        found = {
            access
            for at in range(first, last)
            if self._ends[at] > start
            for access in self._uses[at].values()
        }
        return sorted(found)

    def replace(self, start: int, end: int, access: Access | None) -> None:
        """Forget all of ``[start, end)`` but ``access``."""
        first, last = self._cut(start, end)
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._uses[first:last] = [
            {} if access is None else {(access.stream, access.writes): access}
        ]

    def add(self, start: int, end: int, access: Access) -> None:
        """Put ``access`` beside what is on record for ``[start, end)``."""
        first, last = self._cut(start, end)
        key = (access.stream, access.writes)
        at, filled = first, start
        while at < last:
            if self._starts[at] > filled:
                self._insert(at, filled, self._starts[at], {key: access})
                at, last = at + 1, last + 1
            self._uses[at][key] = access
            filled = self._ends[at]
            at += 1
        if filled < end:
            self._insert(at, filled, end, {key: access})

    def _insert(self, at: int, start: int, end: int, uses: dict[tuple[str, bool], Access]) -> None:
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self._uses.insert(at, uses)

    def __len__(self) -> int:
        return len(self._starts)
