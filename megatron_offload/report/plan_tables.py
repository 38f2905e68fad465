"""A plan as tables: what becomes of which groups, and why. Every group is in exactly one row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from megatron_offload.core.units import format_bytes
from megatron_offload.planning.plan import GroupChoice, OffloadPlan
from megatron_offload.report.console import plain_table

_CHOICE = {True: "moves", False: "stays"}

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


def plan_table(plan: OffloadPlan) -> Table:
    """Return one line for all groups that the plan treats alike."""
    title = "Groups of all pipeline ranks, and why"
    table = plain_table(title, ["group", "choice", "groups", "bytes"], 2)
    table.add_column("reason", overflow="fold")
    for row in plan_rows(plan):
        size = format_bytes(row.num_bytes)
        table.add_row(row.name, _CHOICE[row.moves], str(row.num_groups), size, row.reason)
    return table


def plan_list(plan: OffloadPlan) -> Table:
    """Return one line for each group of each rank, in the order of their commits."""
    columns = ["rank", "chunk", "place", "group", "choice", "bytes"]
    table = plain_table("Every group, and why", columns, 5)
    table.add_column("reason", overflow="fold")
    for index, rank in enumerate(plan.ranks):
        for choice in rank.choices:
            place = (str(index), str(choice.key.chunk), str(choice.key.order))
            size = format_bytes(choice.num_bytes)
            table.add_row(*place, choice.name, _CHOICE[choice.moves], size, choice.reason)
    return table
