"""The table of what each rank has moved, by group name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from rich.table import Table

from megatron_offload.core.units import format_bytes
from megatron_offload.machine.job_ranks import gather
from megatron_offload.report.console import console, plain_table


def print_offload_summary_table(
    total_offload_bytes: Mapping[str, int],
    local_duplicate_summary: Mapping[str, int] | None = None,
    process_group: Any = None,
) -> None:
    """Print one line for each rank and one column for each group name, on the first rank.

    Collective over ``process_group`` where torch.distributed runs; without it this process stands
    alone.

    Args:
        total_offload_bytes: this rank's bytes for each group name.
        local_duplicate_summary: this rank's bytes for each group name that were not moved a second
            time because another group had saved the same memory; a second table.
        process_group: who takes part; None is everybody.
    """
    mine = (dict(total_offload_bytes), dict(local_duplicate_summary or {}))
    everyone = gather(mine, process_group)
    if len(everyone) > 1 and dist.get_rank(process_group) != 0:
        return
    out = console()
    out.print(_bytes_table("Activations offloaded", [entry[0] for entry in everyone]))
    if any(entry[1] for entry in everyone):
        title = "Shared with another group, moved once"
        out.print(_bytes_table(title, [entry[1] for entry in everyone]))


def _bytes_table(title: str, ranks: Sequence[Mapping[str, int]]) -> Table:
    names = sorted({name for rank in ranks for name in rank})
    table = plain_table(title, ["rank", *names, "total"], 1)
    sums = {name: sum(rank.get(name, 0) for rank in ranks) for name in names}
    for label, row in [*((str(i), rank) for i, rank in enumerate(ranks)), ("all", sums)]:
        cells = [*(row.get(name, 0) for name in names), sum(row.values())]
        table.add_row(label, *(format_bytes(num_bytes, 2) for num_bytes in cells))
    return table
