"""Megatron's table of what its ranks have offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from megatron_offload.core.units import format_bytes
from megatron_offload.machine.job_ranks import gather, rank_in
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
        local_duplicate_summary: this rank's bytes for each group name that were not offloaded a
            second time because another group had saved the same memory; a second table.
        process_group: who takes part; None is everybody.
    """
    moved = gather(dict(total_offload_bytes), process_group)
    shared = gather(dict(local_duplicate_summary or {}), process_group)
    if rank_in(process_group) == 0:
        console().print(_bytes_table("Activations offloaded", moved))
        if any(shared):
            console().print(_bytes_table("Shared with another group, offloaded once", shared))


def _bytes_table(title: str, ranks: Sequence[Mapping[str, int]]) -> Table:
    names = sorted({name for rank in ranks for name in rank})
    sums = {name: sum(rank.get(name, 0) for rank in ranks) for name in names}
    rows = []
    for label, row in [*((str(i), rank) for i, rank in enumerate(ranks)), ("all", sums)]:
        sizes = [*(row.get(name, 0) for name in names), sum(row.values())]
        rows.append([label, *(format_bytes(size, 2) for size in sizes)])
    return plain_table(title, ["rank", *names, "total"], 1, rows)
