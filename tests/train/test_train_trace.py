"""A traced step changes no bit, and what every rank writes says how long a step takes."""

from __future__ import annotations

import pytest
import torch
from training_runs import numbers, steps_of

from megatron_offload.core.trace import ByteCount, read_traces

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the bridges to a CPU are for machines without a CUDA device"
)

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1", "run.steps=5", "offload.enabled=true")


def test_a_row_of_a_marked_group_offloads_it(train, tmp_path):
    rows = "offload={rows: [{site: qkv_linear, offload: all}], min_tensor_bytes: 0}"
    train(tmp_path, rows, "run.steps=1")
    assert steps_of(tmp_path)[0]["ranks"][0]["offloaded_bytes"] > 0


def test_a_traced_step_is_bitwise_identical_and_is_the_one_that_was_asked_for(train, tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "traced", "run.trace_step=3")
    assert numbers(tmp_path / "traced") == numbers(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("trace_*"))
    trace = read_traces(tmp_path / "traced/trace_0.json")[0]
    steps = steps_of(tmp_path / "traced")
    (rank,) = steps[2]["ranks"]
    assert trace.num_bytes["d2h"] == rank["offloaded_bytes"] > 0
    assert trace.num_bytes["h2d"] == rank["reloaded_bytes"]
    kinds = {span.kind for span in trace.of("compute")}
    assert {"forward", "backward", "other"} <= kinds
    assert {ByteCount.LIVE, ByteCount.HELD} <= {counter.name for counter in trace.counters}
    # Virtual copies beside real compute, in the same unit as the clock on the wall; the optimizer's
    # part, which isn't traced, is long on a busy machine.
    measured_us = 1e6 * steps[2]["step_time_s"]
    assert 0.002 * measured_us < trace.duration_us < 1.5 * measured_us


def test_a_short_run_traces_its_last_step(train, tmp_path):
    train(tmp_path, "run.trace_step=100", "run.steps=2", "offload.fraction=0.5")
    last = steps_of(tmp_path)[-1]
    trace = read_traces(tmp_path / "trace_0.json")[0]
    assert trace.num_bytes["d2h"] == last["ranks"][0]["offloaded_bytes"] > 0


def test_a_new_run_leaves_nothing_of_an_earlier_one(train, tmp_path):
    for name in ("trace_0.json", "trace_7.json", "frontier.json", "trace_x.json"):
        (tmp_path / name).write_text("old")
    train(tmp_path, "run.steps=1", "offload.enabled=false")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "config.yaml",
        "run.json",
        "steps.jsonl",
        "trace_x.json",
    ]
