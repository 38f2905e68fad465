"""Who used which bytes of a simulated device's memory, and what of it nothing orders.

Two accesses conflict when they touch the same byte, one of them writes, they come from different
streams, and no chain of events and waits leads from the first to the second.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from megatron_offload.backends.base import Wait


class Access(NamedTuple):
    """One use of a region of memory, numbered in the order of the calls."""

    order: int
    stream: str
    writes: bool
    label: str
    home: str
    """The stream in whose order the memory was allocated: another's never gets it."""

    def __str__(self) -> str:
        return f"{self.stream} {'write' if self.writes else 'read'} [{self.label}] (#{self.order})"


class Hazard(NamedTuple):
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
    """Who used which bytes of one memory last: intervals that leave no gap, sorted by address.

    A write that is ordered after all earlier accesses replaces them, which keeps the map small. Of
    one stream's reads (or writes) the newest stands for all.
    """

    def __init__(self) -> None:
        self._intervals: list[tuple[int, dict[tuple[str, bool], Access]]] = [(0, {})]
        """Start and uses of each, in one list: an interrupt leaves no half of a change."""

    def _at(self, border: int) -> int:
        """Return the index of the first interval that doesn't start before a border."""
        return bisect_left(self._intervals, (border,))

    def _cut(self, start: int, end: int) -> slice:
        """Split intervals at both borders; return where those within lie."""
        for border in (start, end):
            at = self._at(border)
            if at == len(self._intervals) or self._intervals[at][0] != border:
                self._intervals.insert(at, (border, dict(self._intervals[at - 1][1])))
        return slice(self._at(start), self._at(end))

    def earlier_uses(self, start: int, end: int) -> list[Access]:
        """Return the accesses on record for ``[start, end)``, oldest first."""
        within = self._intervals[self._at(start + 1) - 1 : self._at(end)]
        return sorted({access for _, uses in within for access in uses.values()})

    def replace(self, start: int, end: int, access: Access | None) -> None:
        """Forget all of ``[start, end)`` but ``access``."""
        uses = {} if access is None else {(access.stream, access.writes): access}
        self._intervals[self._cut(start, end)] = [(start, uses)]

    def add(self, start: int, end: int, access: Access) -> None:
        """Put ``access`` beside what is on record for ``[start, end)``."""
        for _, uses in self._intervals[self._cut(start, end)]:
            uses[access.stream, access.writes] = access
