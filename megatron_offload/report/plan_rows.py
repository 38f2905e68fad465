"""A plan in few lines: groups of one name that it treats alike, and the range of their reasons.

Owns the folding. Must not know policies: a reason is text in which times may stand.

Invariant: every group of the plan is in exactly one row. Read next:
`megatron_offload.planning.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron_offload.planning.plan import GroupChoice, OffloadPlan

__all__ = ["PlanRow", "plan_rows"]

_TIME = re.compile(r"(\d+(?:\.\d+)?) ms")


class PlanRow(NamedTuple):
    """Groups of one name that a plan treats alike, over all pipeline ranks."""

    name: str
    moves: bool
    reason: str
    """Of all of them; times that differ as their range."""
    num_groups: int
    num_bytes: int


def plan_rows(plan: OffloadPlan) -> list[PlanRow]:
    """Return what a plan says by group name and reason.

    Names come in the order of its groups, and of one name first what moves.
    """
    found: dict[tuple[str, bool, str], list[GroupChoice]] = {}
    for rank in plan.ranks:
        for choice in rank.choices:
            key = (choice.name, choice.moves, _TIME.sub("ms", choice.reason))
            found.setdefault(key, []).append(choice)
    names = list(dict.fromkeys(name for name, _, _ in found))
    rows = [
        PlanRow(
            name,
            moves,
            _folded([choice.reason for choice in choices]),
            len(choices),
            sum(choice.num_bytes for choice in choices),
        )
        for (name, moves, _), choices in found.items()
    ]
    return sorted(rows, key=lambda row: (names.index(row.name), not row.moves))


def _folded(reasons: Sequence[str]) -> str:
    """Return reasons that differ in their times alone as one."""
    columns = zip(*(_TIME.findall(reason) for reason in reasons), strict=True)
    ranges = iter([(min(times, key=float), max(times, key=float)) for times in columns])

    def fill(_: re.Match[str]) -> str:
        low, high = next(ranges)
        return f"{low} ms" if low == high else f"{low} to {high} ms"

    return _TIME.sub(fill, reasons[0])
