"""A run that finds rows: all ranks follow those of one plan each stage, and no bit changes."""

from __future__ import annotations

import pytest
from training_runs import numbers, run, words

from megatron_offload.planning.found import read_frontier
from megatron_offload.train.records import read_steps

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
    steps = read_steps(output)
    usual = [step for step in steps if step.is_usual]
    assert usual == steps[-len(usual) :]
    assert 11 < len(steps) - len(usual) < 99
    freed = [rank.offloaded_bytes + rank.recomputed_bytes for x in usual for rank in x.ranks]
    assert min(freed) > 0
