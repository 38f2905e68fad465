"""Tables of what was offloaded, of two runs side by side, of plans, and of what settings cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.observe.run_report import RankSummary
from megatron_offload.planning.found import Alternatives, FoundStage
from megatron_offload.planning.row_choice import Slowdown
from megatron_offload.report.console import plain_table

_RANK = {
    "rank": "rank",
    "pp": "pp_rank",
    "offloaded": "offloaded_bytes",
    "reloaded": "reloaded_bytes",
    "recomputed": "recomputed_bytes",
    "late": "num_late_reloads",
    "saved, peak": "peak_live_activation_bytes",
    "host, peak": "peak_host_bytes",
}
SLOW_LINK = "slower link"  # what a step takes with it, as the verdict says
_NUM_PLANS = 12  # of those that a run has found, at least
_ROWS_WIDTH = 30  # characters: then the table fits a terminal of 80
_ALTERNATIVE = ("", "what is done", "fits", "reserved", "host of a node", "step time", SLOW_LINK)
_FOUND = ("plan", "", "rows", "frees", "needs", "predicted", SLOW_LINK, "measured")
_GPU = {"peak allocated": "peak_allocated_bytes", "peak reserved": "peak_reserved_bytes"}


def rank_table(ranks: Sequence[RankSummary], title: str) -> Table:
    """Return one line for each rank."""
    on_gpu = any(rank.peak_reserved_bytes is not None for rank in ranks)
    columns, rows = _RANK | _GPU if on_gpu else _RANK, []
    for rank in ranks:
        cells = ((key, getattr(rank, key)) for key in columns.values())
        rows.append([format_bytes(x) if key.endswith("_bytes") else x for key, x in cells])
    return plain_table(title, list(columns), 0, rows)


def found_rows(stage: FoundStage, **marks: int) -> list[list[str]]:
    """Return some plans that a run has found: those that were tried, others at equal distances.

    Of so few as are shown at least all are. First come the columns' names; of each plan there is
    its number, which of ``marks`` it has, its rows, what it frees and needs, and what of a step it
    is predicted to take, with a slower link too, and took.
    """
    plans, needed = stage.plans, stage.needed_bytes()
    wanted = [plans[-1].freed_bytes * step // _NUM_PLANS for step in range(_NUM_PLANS + 1)]
    shown = {next(p for p, x in enumerate(plans) if x.freed_bytes >= size) for size in wanted}
    shown |= {place for place, plan in enumerate(plans) if plan.measured_percent}
    shown |= {*range(len(plans))} if len(plans) <= _NUM_PLANS + 1 else set()
    rows = []
    for place in sorted({*shown, *marks.values()}):
        plan = plans[place]
        which = [word for word, marked in marks.items() if marked == place]
        what = _in_short(plan.rows) or "nothing"
        size = format_bytes(needed[place]) if stage.bare_bytes else "not known"
        measured = str(Slowdown(*plan.measured_percent)) if plan.measured_percent else ""
        takes = *map(_percent, (plan.predicted_percent, plan.slow_link_percent)), measured
        rows.append(
            [str(place), ", ".join(which), what, format_bytes(plan.freed_bytes), size, *takes]
        )
    return _filled(_FOUND, rows)


def _percent(percent: float | None) -> str:
    return "" if percent is None else f"{percent:+z.1f} %"


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return names and rows without the columns in which nothing stands, but for the first."""
    kept = [place for place in range(len(columns)) if place < 3 or any(x[place] for x in rows)]
    return [[row[place] for place in kept] for row in (columns, *rows)]


def _in_short(rows: Iterable[RowConfig]) -> str:
    """Return what rows do, without the parts of a site that go with the whole of it."""
    does: dict[str, list[str]] = {}
    for row in rows:
        if row.offload == "all" and "." in row.site and row.site != "mlp.experts":
            continue
        # A list may be broken behind a comma alone.
        text = row.site if row.layers == "all" else f"{row.site} {row.layers.replace(',', ', ')}"
        if len(text) > 2 * _ROWS_WIDTH:
            text = f"{row.site} in {len(row.numbers())} layers"
        if row.most is not None and row.offload:
            text += f" ({row.most} of its tensors)"
        does.setdefault("offload" if row.offload else "recompute", []).append(text)
    return "; ".join(f"{verb} {', '.join(texts)}" for verb, texts in does.items())


def found_table(stage: FoundStage, **marks: int) -> Table:
    """Return a line for each of `found_rows`."""
    found = found_rows(stage, **marks)
    columns, *rows = [[f"{row[0]} {row[1]}".strip(), *row[2:]] for row in found]
    some = f", {len(rows)} of {len(stage.plans)}" if len(rows) < len(stage.plans) else ""
    table = plain_table(f"Plans of stage {stage.name}{some}", columns, 2, rows)
    table.columns[1].max_width = _ROWS_WIDTH
    return table


def alternative_rows(found: Alternatives) -> list[list[str]]:
    """Return the columns' names, and the cells of each alternative with its number in a picture."""
    rows = [
        [
            str(number),
            one.what,
            "yes" if one.fits else "no",
            *map(format_bytes, (one.reserved_bytes, one.node_host_bytes)),
            *map(_percent, (one.takes_longer_percent, one.slow_link_percent)),
        ]
        for number, one in enumerate(found.each, 1)
    ]
    return _filled(_ALTERNATIVE, rows)


def alternative_table(found: Alternatives) -> Table:
    """Return a line for each of `alternative_rows`."""
    title = f"What {found.title} may do in each stage: PREDICTED"
    columns, *rows = alternative_rows(found)
    return plain_table(title, columns, 2, rows)
