"""What steps come to, and whether two runs are the same, to the last bit."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from megatron_offload.train.records import RankStep, StepRecord, compare_steps, summarize


def record(step=1, loss=1.0, grad_norm=2.0, gradients="g", parameters="p", **changes):
    same = {"grad_norm": grad_norm, "step_time_s": 0.1} | changes
    ranks = [
        RankStep(rank=0, gradients="same", parameters="same", **same),
        RankStep(rank=1, pp_rank=1, loss=loss, gradients=gradients, parameters=parameters, **same),
    ]
    return StepRecord.merge(step, 64, ranks)


def test_the_median_leaves_out_the_first_step_and_one_that_was_unlike_the_others():
    times = {1: 100.0, 2: 1.0, 3: 50.0, 4: 2.0, 5: 3.0}
    steps = [record(step, step_time_s=t) for step, t in times.items()]
    assert summarize(steps, traced_step=3)["step_time_s"] == 2.0
    assert summarize(steps)["step_time_s"] == 2.5
    assert summarize(steps[:1])["step_time_s"] is None
    assert summarize(steps[:2], traced_step=2)["step_time_s"] is None


def test_a_line_is_json_with_all_bits_whatever_the_loss_is():
    tiny = record(loss=math.nextafter(0.1, 1.0), grad_norm=1e-5)
    assert json.loads(tiny.line()) == json.loads(json.dumps(asdict(tiny)))
    for loss, written in ((math.nan, "NaN"), (-math.inf, "-Infinity")):
        found = json.loads(record(loss=loss).line(), parse_constant=pytest.fail)
        assert (found["loss"], found["ranks"][1]["loss"]) == (written, written)


def test_a_step_before_rows_are_found_counts_for_no_peak_and_no_time():
    steps = [record(step, step_time_s=2.0, peak_host_bytes=5 - step) for step in (1, 2, 3)]
    ranks = [replace(rank, is_planned_by=True, peak_host_bytes=9999) for rank in steps[1].ranks]
    steps[1] = replace(steps[1], step_time_s=50.0, ranks=tuple(ranks))
    found = summarize(steps)
    assert (found["num_steps"], found["step_time_s"]) == (3, 2.0)
    assert [rank.peak_host_bytes for rank in found["by_rank"]] == [4, 4]
    assert summarize(steps[1:2])["by_rank"][0].peak_host_bytes == 9999


@pytest.mark.parametrize(
    ("one", "other", "is_identical"),
    [
        ({}, {}, True),
        ({}, {"loss": math.nextafter(1.0, 2.0)}, False),
        ({}, {"grad_norm": math.nextafter(2.0, 1.0)}, False),
        ({}, {"gradients": "h"}, False),
        ({}, {"parameters": "r"}, False),
        ({}, {"loss": math.nan}, False),
        ({"gradients": None}, {"gradients": None}, False),  # no digest is no proof
        ({"parameters": None}, {"parameters": None}, False),
    ],
)
def test_the_smallest_difference_anywhere_counts(one, other, is_identical):
    assert compare_steps([record(**one)], [record(**other)]).is_identical == is_identical
