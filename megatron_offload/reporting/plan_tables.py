"""Tables of a plan: what becomes of which groups, and why.

Owns pure formatting with rich. Must not know how plans are made.

Invariant: names and reasons come from files, and are never taken for markup. Read next:
`megatron_offload.reporting.plan_rows`.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.reporting.plan_rows import plan_rows
from megatron_offload.units import format_bytes

__all__ = ["plan_list", "plan_table"]

_CHOICE = {True: "moves", False: "stays"}


def plan_table(plan: OffloadPlan) -> Table:
    """Return one line for all groups that the plan treats alike."""
    table = _table("Groups of all pipeline ranks, and why", "group", "choice")
    table.add_column("groups", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("reason")
    for row in plan_rows(plan):
        size = format_bytes(row.num_bytes)
        table.add_row(
            Text(row.name), _CHOICE[row.moves], str(row.num_groups), size, Text(row.reason)
        )
    return table


def plan_list(plan: OffloadPlan) -> Table:
    """Return one line for each group of each rank, in the order of their commits."""
    table = _table("Every group, and why", "rank", "chunk", "place", "group", "choice")
    table.add_column("bytes", justify="right")
    table.add_column("reason")
    for index, rank in enumerate(plan.ranks):
        for choice in rank.choices:
            place = (str(index), str(choice.key.chunk), str(choice.key.order))
            size = format_bytes(choice.num_bytes)
            table.add_row(
                *place, Text(choice.name), _CHOICE[choice.moves], size, Text(choice.reason)
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
