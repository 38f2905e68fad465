"""Tables of a plan: what becomes of which groups, and why.

Owns pure formatting with rich. Must not know how plans are made.

Invariant: names and reasons come from files, so they stay strings. Read next:
`megatron_offload.report.plan_rows`.
"""

from __future__ import annotations

from rich.table import Table

from megatron_offload.core.units import format_bytes
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.report.console import plain_table
from megatron_offload.report.plan_rows import plan_rows

__all__ = ["plan_list", "plan_table"]

_CHOICE = {True: "moves", False: "stays"}


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
