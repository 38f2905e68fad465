"""A run that finds what to offload: all ranks settle on one plan, and no bit changes."""

from __future__ import annotations

import pytest
from training_runs import numbers, run, words

from megatron_offload.planning.files import load_plan, load_profile
from megatron_offload.train.records import read_steps

LONG = "run.steps=30"
"""Enough for every plan that there may be."""


@pytest.mark.slow
def test_all_ranks_follow_the_plan_that_they_have_converged_on_and_bits_are_identical(tmp_path):
    plain, output = tmp_path / "plain", tmp_path / "planned"
    assert run(words(plain, LONG))[0] == 0
    last = read_steps(plain)[-1]
    live_bytes = [rank.peak_live_activation_bytes for rank in last.ranks]
    target_bytes = int(0.9 * min(live_bytes))
    policy = f"offload.policy={{kind: memory_target, memory_target: {target_bytes}}}"
    settings = ("offload.enabled=true", policy, "offload.simulated.d2h_gbps=7.5")
    status, errors = run(words(output, LONG, *settings, "run.profile_step=3"))
    assert status == 0, errors
    assert numbers(output) == numbers(plain)
    plan = load_plan(output / "plan.json")
    assert plan.policy == "memory_target"
    found = read_steps(output)
    usual = [step for step in found if step.is_usual]
    assert usual == found[-len(usual) :]
    assert 3 < len(found) - len(usual) <= 26
    # What that takes goes by the machine's own time here; targets are held on the virtual clock.
    for pp_rank, rank_plan in enumerate(plan.ranks):
        assert rank_plan.measured_peak_bytes > 0
        plan.check(load_profile(output / f"profile_{pp_rank}.json"))
        assert all(0 < x.ranks[pp_rank].offloaded_bytes <= rank_plan.moved_bytes for x in usual)
