"""A line of steps.jsonl is reloaded as the record that it was made of, bit for bit."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import pytest

from megatron_offload.engine.stats import GroupStats
from megatron_offload.errors import ConfigError
from megatron_offload.train.records import (
    RankStep,
    RunReport,
    StepRecord,
    compare_reports,
    read_steps,
)


def record(step=1, loss=0.1, grad_norm=2.0):
    group = GroupStats("mlp", offloaded_bytes=3)
    ranks = [
        RankStep(0, 0, 0, None, grad_norm, 0.5, peak_live_activation_bytes=7, gradients="ab"),
        RankStep(1, 1, 0, loss, grad_norm, 0.25, offloaded_bytes=3, groups=(group,)),
    ]
    return StepRecord.merge(step, 64, ranks)


@pytest.mark.parametrize("loss", [0.1, math.pi, 5e-324, math.inf, math.nan])
def test_a_line_round_trips_as_its_record(loss, tmp_path):
    written = record(loss=loss, grad_norm=loss)
    (tmp_path / "steps.jsonl").write_text(written.to_json() + "\n")
    assert repr(read_steps(tmp_path)) == repr([written]), "as text: NaN doesn't equal itself"


def test_a_run_without_a_step_has_no_peaks():
    assert RunReport().peaks() == []


def test_without_an_end_all_whole_lines_are_read(tmp_path):
    lines = [record(step).to_json() + "\n" for step in (1, 2, 3)]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(lines) + '{"step": 4, "lo')
    assert read_steps(tmp_path) == [record(1), record(2), record(3)]
    assert read_steps(tmp_path / "none") == []
    path.write_text(lines[0] + lines[2])
    with pytest.raises(ConfigError, match="step 3, which does not follow"):
        read_steps(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [lines[0], *lines], "line 2 is of step 1"),
        (lambda lines: [b"{}\n", *lines], "line 1: 'step' is required"),
        (lambda lines: [b"[1, 2]\n", *lines], "line 1 must hold a mapping"),
        (lambda lines: [b"\xff\n", *lines], "line 1 is not plain JSON"),
        (lambda lines: [lines[0].replace(b'"step": 1', b'"step": "x"')], "line 1: 'step'"),
        (lambda lines: [lines[0].replace(b'"loss": ', b'"loss": "z", "x": ')], "'loss'"),
        (lambda lines: [lines[0].replace(b'"kept_bytes": ', b'"kept_bytes": "z", "x": ')], "kept_"),
        (lambda lines: [lines[0].replace(b'"ranks": [', b'"ranks": [7, ')], "'ranks.0'"),
        (lambda lines: [b"[" * 1000 + b"]" * 1000 + b"\n"], "recursion limit"),
    ],
)
def test_a_broken_log_is_refused(tmp_path, change, expected):
    lines = [record(step).to_json().encode() + b"\n" for step in (1, 2)]
    (tmp_path / "steps.jsonl").write_bytes(b"".join(change(lines)))
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_steps(tmp_path)


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "steps.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_steps(tmp_path)


def test_the_median_leaves_out_the_first_step_and_one_that_was_unlike_the_others():
    times = {1: 100.0, 2: 1.0, 3: 50.0, 4: 2.0, 5: 3.0}
    report = RunReport([replace(record(step), step_time_s=t) for step, t in times.items()])
    assert report.median_step_time_s(without=3) == 2.0
    assert report.median_step_time_s() == 2.5
    assert RunReport(report.steps[:1]).median_step_time_s() is None
    assert RunReport(report.steps[:2]).median_step_time_s(without=2) is None


def test_a_step_before_rows_are_found_counts_for_no_peak_and_no_time():
    steps = [record(step) for step in (1, 2, 3)]
    ranks = [replace(rank, is_planned_by=True, peak_host_bytes=9999) for rank in steps[1].ranks]
    searched = replace(steps[1], step_time_s=50.0, ranks=tuple(ranks))
    report = RunReport([steps[0], searched, replace(steps[2], step_time_s=2.0)])
    assert report.median_step_time_s() == 2.0
    assert report.peaks() == RunReport([steps[0], steps[2]]).peaks()
    assert RunReport([searched]).peaks()[0]["peak_host_bytes"] == 9999


def report(loss=1.0, grad_norm=2.0, gradients="g", parameters="p"):
    ranks = [
        RankStep(0, 0, 0, None, grad_norm, 0.1, gradients="same", parameters="same"),
        RankStep(1, 1, 0, loss, grad_norm, 0.1, gradients=gradients, parameters=parameters),
    ]
    return RunReport([StepRecord.merge(1, 64, ranks)])


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
    assert compare_reports(report(**one), report(**other)).is_identical == is_identical
