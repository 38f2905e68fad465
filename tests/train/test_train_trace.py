"""A traced step changes no bit, and timelines are those of the run that the folder holds."""

from __future__ import annotations

import json

import pytest
import torch
from training_runs import numbers

from megatron_offload.core.trace import HELD_BYTES, LIVE_BYTES, read_traces

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the bridges to a CPU are for machines without a CUDA device"
)

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1", "run.steps=4", "offload.enabled=true")


def test_a_traced_step_changes_no_bit_and_is_the_one_that_was_asked_for(train, tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "traced", "run.trace_step=3")
    assert numbers(tmp_path / "traced") == numbers(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("trace_*"))
    trace = read_traces(tmp_path / "traced/trace_0.json")[0]
    lines = (tmp_path / "traced/steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert trace.summary().num_bytes["d2h"] == steps[2]["offloaded_bytes"] > 0
    kinds = {span.kind for span in trace.of("compute")}
    assert {"forward", "backward", "other"} <= kinds
    assert {LIVE_BYTES, HELD_BYTES} <= {counter.name for counter in trace.counters}
    # Virtual copies beside real compute, in the same unit as the clock on the wall; the optimizer's
    # part, which isn't traced, is long on a busy machine.
    measured_us = 1e6 * steps[2]["step_time_s"]
    assert 0.002 * measured_us < trace.summary().duration_us < 1.5 * measured_us


def test_a_short_run_traces_its_last_step(train, tmp_path):
    train(tmp_path, "run.trace_step=100", "run.steps=2", "offload.fraction=0.5")
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    trace = read_traces(tmp_path / "trace_0.json")[0]
    assert trace.summary().num_bytes["d2h"] == last["offloaded_bytes"] > 0


def test_a_new_run_leaves_nothing_of_an_earlier_one(train, tmp_path):
    mine = ("profile_x.json", "trace_x.json")
    earlier = ("profile_0.json", "profile_7.json", "trace_0.json", "bandwidths.json")
    for name in (*earlier, *mine):
        (tmp_path / name).write_text("old")
    train(tmp_path, "run.steps=1", "offload.enabled=false")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "config.yaml",
        "profile_x.json",
        "run.json",
        "steps.jsonl",
        "trace_x.json",
    ]
