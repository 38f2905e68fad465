"""Tables about what moved: per rank, per group, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from megatron_offload.core.units import format_bytes
from megatron_offload.report.console import plain_table


def rank_table(ranks: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return one line for each rank.

    Args:
        ranks: mappings with the keys of `_RANK`, and on a GPU of `_GPU`.
        title: stands above the table.
    """
    on_gpu = any(rank.get("peak_reserved_bytes") is not None for rank in ranks)
    columns = _RANK | _GPU if on_gpu else _RANK
    table = plain_table(title, list(columns))
    for rank in ranks:
        table.add_row(*_cells(rank, columns))
    return table


def group_table(ranks: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return one line for each group name on each rank.

    Args:
        ranks: mappings with ``rank`` and ``groups``: a sequence of mappings with the keys of
            `_GROUP`.
        title: stands above the table.
    """
    table = plain_table(title, ["rank", *_GROUP], 2)
    for rank in ranks:
        for group in rank["groups"]:
            table.add_row(str(rank["rank"]), *_cells(group, _GROUP))
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


_RANK = {
    "rank": "rank",
    "pp": "pp_rank",
    "dp": "dp_rank",
    "offloaded": "offloaded_bytes",
    "reloaded": "reloaded_bytes",
    "late": "num_late_reloads",
    "peak live saved": "peak_live_activation_bytes",
    "host": "peak_host_bytes",
}
_GPU = {"peak allocated": "peak_allocated_bytes", "peak reserved": "peak_reserved_bytes"}
_GROUP = {
    "group": "name",
    "groups": "num_groups",
    "offloaded": "offloaded_bytes",
    "reloaded": "reloaded_bytes",
    "kept": "kept_bytes",
    "late": "num_late_reloads",
}


def _cells(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [
        format_bytes(row[key]) if key.endswith("_bytes") else str(row[key])
        for key in columns.values()
    ]
