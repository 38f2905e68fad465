"""Which groups of a steady step are recorded as one: neighbours that move, and what is inside them.

Each boundary takes the host's time, however little lies behind it. Groups that leave together need
one at their beginning and one at their end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

from megatron_offload.core.profile import GroupKey


class Started(NamedTuple):
    """A group, as far as that goes: ``num_bytes`` leave the device at its end."""

    key: GroupKey
    name: str
    num_bytes: int
    is_inside: bool
    """Whether it began inside the one before it, or inside what that one is inside of."""
    may_join: bool


Joining = dict[GroupKey, tuple[GroupKey, str]]
"""Of each group that is recorded as one with the next that starts, that one's key and name."""


def joined_groups(
    started: Iterable[Started], ends: Collection[GroupKey], enough_bytes: int
) -> Joining:
    """Return the groups that are recorded as one in steps like this one.

    A group goes with all that is inside of it, if that is no more than twice enough, and on with
    those that follow until there is enough. What holds nothing goes on with none that has enough by
    itself: backward would leave that later.

    Args:
        started: those that were recorded, in the order in which they began.
        ends: those behind which something asked for all that had been committed.
        enough_bytes: what `DeviceBudget.joined_bytes` says.
    """
    joining: Joining = {}
    last: Started | None = None
    joined_bytes = 0
    for unit in _units(started):
        unit_bytes = sum(group.num_bytes for group in unit)
        if unit_bytes > 2 * enough_bytes or not all(group.may_join for group in unit):
            last = None
            continue
        follows = last is not None and last.key.chunk == unit[0].key.chunk
        lacks = 0 < joined_bytes < enough_bytes or joined_bytes + unit_bytes < enough_bytes
        if last is not None and follows and lacks and last.key not in ends:
            unit.insert(0, last)
            unit_bytes += joined_bytes
        joining.update((one.key, (other.key, other.name)) for one, other in pairwise(unit))
        last, joined_bytes = unit[-1], unit_bytes
    return joining


def _units(started: Iterable[Started]) -> list[list[Started]]:
    """Return the groups that are inside of none, each with those inside of it."""
    units: list[list[Started]] = []
    for group in started:
        if group.is_inside and units:
            units[-1].append(group)
        else:
            units.append([group])
    return units
