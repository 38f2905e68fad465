"""Tables about what moved: per rank, per group, and two runs side by side.

Owns pure formatting with rich, from plain mappings and numbers. Must not know torch, the engine or
the trainer.

Invariant: nothing here computes a statistic that its input does not hold, sums and ratios apart.
Read next: `megatron_offload.report.plots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from megatron_offload.core.units import format_bytes
from megatron_offload.report.console import plain_table

__all__ = [
    "compare_table",
    "group_table",
    "memory_table",
    "rank_table",
]


def rank_table(ranks: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return one line for each rank.

    Args:
        ranks: mappings with ``rank``, ``pp_rank``, ``dp_rank``, ``offloaded_bytes``,
            ``reloaded_bytes``, ``num_late_reloads``, ``peak_live_activation_bytes``,
            ``peak_host_bytes``, and on a GPU ``peak_allocated_bytes`` and ``peak_reserved_bytes``.
        title: stands above the table.
    """
    on_gpu = any(rank.get("peak_reserved_bytes") is not None for rank in ranks)
    columns = ["rank", "pp", "dp", "offloaded", "reloaded", "late", "peak live saved", "host"]
    table = plain_table(title, columns + (["peak allocated", "peak reserved"] if on_gpu else []))
    for rank in ranks:
        cells = [
            str(rank["rank"]),
            str(rank["pp_rank"]),
            str(rank["dp_rank"]),
            format_bytes(rank["offloaded_bytes"]),
            format_bytes(rank["reloaded_bytes"]),
            str(rank["num_late_reloads"]),
            format_bytes(rank["peak_live_activation_bytes"]),
            format_bytes(rank["peak_host_bytes"]),
        ]
        if on_gpu:
            cells += [
                format_bytes(rank["peak_allocated_bytes"]),
                format_bytes(rank["peak_reserved_bytes"]),
            ]
        table.add_row(*cells)
    return table


def group_table(ranks: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return one line for each group name on each rank.

    Args:
        ranks: mappings with ``rank`` and ``groups``: a sequence of mappings with ``name``,
            ``num_groups``, ``offloaded_bytes``, ``reloaded_bytes``, ``kept_bytes`` and
            ``num_late_reloads``.
        title: stands above the table.
    """
    table = plain_table(
        title, ["rank", "group", "groups", "offloaded", "reloaded", "kept", "late"], 2
    )
    for rank in ranks:
        for group in rank["groups"]:
            table.add_row(
                str(rank["rank"]),
                str(group["name"]),
                str(group["num_groups"]),
                format_bytes(group["offloaded_bytes"]),
                format_bytes(group["reloaded_bytes"]),
                format_bytes(group["kept_bytes"]),
                str(group["num_late_reloads"]),
            )
    return table


def compare_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one line for each step of two runs.

    Args:
        rows: mappings with ``step``, ``loss`` and ``grad_norm`` (pairs: without, with offload) and
            ``equal``.
    """
    columns = ["step", "loss", "loss, offload", "grad norm", "grad norm, offload", "equal"]
    table = plain_table("Every step without and with offload", columns)
    for row in rows:
        table.add_row(
            str(row["step"]),
            *(f"{value:.9g}" for value in (*row["loss"], *row["grad_norm"])),
            Text("yes", "green") if row["equal"] else Text("no", "bold red"),
        )
    return table


def memory_table(
    without: Sequence[Mapping[str, Any]], offloaded: Sequence[Mapping[str, Any]]
) -> Table:
    """Return each rank's peak of live saved activations in two runs, and their ratio.

    Args:
        without: one mapping per rank as in `rank_table`, of the run without offload.
        offloaded: the same of the run with offload, in the same order.
    """
    keys = [("peak_live_activation_bytes", "live saved"), ("peak_reserved_bytes", "reserved")]
    keys = [(key, name) for key, name in keys if without and without[0].get(key) is not None]
    columns = ["rank"]
    for _, name in keys:
        columns += [f"peak {name}", "with offload", "ratio"]
    table = plain_table("Device memory per rank, most over usual steps", columns)
    for plain, moved in zip(without, offloaded, strict=True):
        cells = [str(plain["rank"])]
        for key, _ in keys:
            ratio = f"{moved[key] / plain[key]:.2f}" if plain[key] else "-"
            cells += [format_bytes(plain[key]), format_bytes(moved[key]), ratio]
        table.add_row(*cells)
    return table
