"""A run that finds rows: all ranks follow those of one plan each stage, and no bit changes."""

from __future__ import annotations

import json

import pytest
from training_runs import numbers, run, words

from megatron_offload.planning.found import read_frontier

LONG = "run.steps=100"
"""Enough for one plan."""


@pytest.mark.slow
def test_all_ranks_follow_the_rows_that_were_found_and_bits_are_identical(tmp_path):
    plain, output = tmp_path / "plain", tmp_path / "planned"
    assert run(words(plain, LONG))[0] == 0
    assert not (plain / "frontier.json").exists()
    policy = "offload.policy={kind: auto, most_slowdown_percent: 1000, measured_plans: 1}"
    status, errors = run(words(output, LONG, "offload.enabled=true", policy))
    assert status == 0, errors
    assert numbers(output) == numbers(plain)
    found = read_frontier(output)
    assert len(found.stages) == 2
    assert all(stage.followed for stage in found.stages)
    assert errors.count(found.followed) == 1, "it is said once"
    steps = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    planned = [step["ranks"][0]["is_planned_by"] for step in steps]
    assert planned == sorted(planned, reverse=True)
    assert 11 < sum(planned) < 99
    usual = [rank for step in steps[sum(planned) :] for rank in step["ranks"]]
    assert min(rank["offloaded_bytes"] + rank["recomputed_bytes"] for rank in usual) > 0
