"""What a table says of the plans that a run has found."""

from __future__ import annotations

from megatron_offload.core.row_config import RowConfig
from megatron_offload.planning.found import FoundPlan, FoundStage
from megatron_offload.report.tables import found_rows


def test_rows_are_said_in_short_without_the_parts_of_what_goes_as_a_whole():
    rows = [
        {"layers": "0-1,9", "site": "attention", "offload": "all"},
        {"layers": "0-1,9", "site": "self_attention.core_attention", "offload": "all"},
        {"layers": 3, "site": "mlp", "offload": 2},
        {"layers": "4-5", "site": "mlp.experts", "offload": "all"},
        {"site": "norm", "recompute": True},
        {"layers": 7, "site": "layer", "recompute": True},
    ]
    plans = (
        FoundPlan(rows=(), freed_bytes=0, predicted_percent=0.0),
        FoundPlan(rows=[RowConfig(**row) for row in rows], freed_bytes=7, predicted_percent=1.0),
    )
    stage = FoundStage(name="0", bare_bytes=9, plans=plans, followed=1)
    nothing, some = found_rows(stage)
    assert nothing[2] == "nothing"
    assert some[1:3] == [
        "followed",
        "offload attention 0-1,9, mlp 3 (2 of its tensors), mlp.experts 4-5; "
        "recompute norm, layer 7",
    ]
