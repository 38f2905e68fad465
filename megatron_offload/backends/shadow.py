"""Who used which bytes last, and what two uses that nothing orders are called.

Whether one access is ordered after another, `megatron_offload.backends.simulated` decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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

    __slots__ = ("_starts", "_uses")

    def __init__(self) -> None:
        self._starts = [0]
        self._uses: list[dict[tuple[str, bool], Access]] = [{}]

    def _cut(self, start: int, end: int) -> slice:
        """Split intervals at both borders; return where those within lie."""
        for border in (start, end):
            at = bisect_left(self._starts, border)
            if self._starts[at : at + 1] != [border]:
                self._starts.insert(at, border)
                self._uses.insert(at, dict(self._uses[at - 1]))
        return slice(bisect_left(self._starts, start), bisect_left(self._starts, end))

    def earlier_uses(self, start: int, end: int) -> list[Access]:
        """Return the accesses on record for ``[start, end)``, oldest first."""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        return sorted({access for uses in self._uses[first:last] for access in uses.values()})

    def replace(self, start: int, end: int, access: Access | None) -> None:
        """Forget all of ``[start, end)`` but ``access``."""
        within = self._cut(start, end)
        self._starts[within] = [start]
        self._uses[within] = [{} if access is None else {(access.stream, access.writes): access}]

    def add(self, start: int, end: int, access: Access) -> None:
        """Put ``access`` beside what is on record for ``[start, end)``."""
        for uses in self._uses[self._cut(start, end)]:
            uses[access.stream, access.writes] = access

    def __len__(self) -> int:
        return len(self._starts)
