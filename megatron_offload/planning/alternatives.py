"""What a described job may do in place of a plan: recompute, offload, and both, as switches say it.

A plan chooses layer by layer; these are what one sets without it, to see what it wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_offload.core.row_config import UNITS, RowConfig, ranges
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.job_rows import WHOLE_SITES, units_of


def alternatives(job: Job, settings: RankSettings) -> Iterator[tuple[str, tuple[RowConfig, ...]]]:
    """Yield what can be done, in words and as rows, of what may be; the first is nothing."""
    marked = [[group.layer for group in stage.groups if group.is_marked] for stage in job.stages]
    stages = [sorted({layer for layer in own if layer is not None}) for own in marked]
    num_layers = max(map(len, stages))

    def some(first: int, end: int, **does: Any) -> RowConfig:
        chosen = ranges(layer for own in stages for layer in own[first:end])
        return RowConfig(site="layer", layers=chosen, **does)

    yield "nothing", ()
    if not num_layers:  # the job recomputes all layers itself
        return
    may = settings.recomputable((*UNITS, *WHOLE_SITES))
    units = units_of(job)
    selective = [RowConfig(site=unit, recompute=True) for unit in units]
    is_selective = bool(units) and {*units} <= {*may}
    if is_selective:
        yield f"recompute {', '.join(units)}", tuple(selective)
    counts = sorted({num_layers // 4, num_layers // 2, num_layers} - {0})
    for count in counts if "layer" in may else ():  # the first of each stage, as ``block``
        which = "all layers" if count == num_layers else f"{count} of {num_layers} layers"
        yield f"recompute {which}", (some(0, count, recompute=True),)
    everything = some(0, num_layers, offload="all")
    yield "offload everything", (everything,)
    if is_selective:
        yield f"offload others, recompute {', '.join(units)}", (*selective, everything)
    if counts[1:] and "layer" in may:
        half = some(0, counts[-2], recompute=True), some(counts[-2], num_layers, offload="all")
        yield f"recompute {counts[-2]} of {num_layers} layers, offload others", half
