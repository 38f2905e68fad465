"""A run that finds what to move: all ranks settle on one plan, and no bit changes."""

from __future__ import annotations

import re

import pytest
from training_runs import numbers, run, words

from megatron_offload.planning.bandwidths import load_bandwidths
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.train.records import read_steps

OFFLOAD = "offload.enabled=true"
TARGET = "offload.policy.kind=memory_target"
LONG = "run.steps=15"
"""Enough for every plan that there may be."""


def train(output, *settings, **more):
    return run([*words(output, *settings)], **more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without offload; read-only."""
    output = tmp_path_factory.mktemp("plain")
    assert train(output, LONG)[0] == 0
    return output


@pytest.mark.slow
def test_a_target_is_kept_by_every_rank_and_no_bit_changes(plain, tmp_path):
    last = read_steps(plain)[0][-1]
    live_bytes = [rank.peak_live_activation_bytes for rank in last.ranks]
    target_bytes = int(0.9 * min(live_bytes))
    settings = (OFFLOAD, TARGET, f"offload.policy.target_bytes={target_bytes}")
    settings += ("offload.simulated.d2h_gbps=7.5", "run.profile_step=3")
    status, errors = train(tmp_path, LONG, *settings)
    assert status == 0, errors
    assert numbers(tmp_path) == numbers(plain)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.policy == "memory_target"
    assert load_bandwidths(tmp_path / "bandwidths.json").machine.d2h_gbps == pytest.approx(7.5)
    found = read_steps(tmp_path)[0]
    usual = [step for step in found if step.is_usual]
    assert usual == found[-len(usual) :]
    assert len(found) - len(usual) in (6, 9, 12)
    # From the third on no step takes what it takes without offload.
    for pp_rank, rank_plan in enumerate(plan.ranks):
        steps = [step.ranks[pp_rank] for step in found[2:]]
        assert max(one.peak_live_activation_bytes for one in steps) < live_bytes[pp_rank]
        assert 0 < rank_plan.measured_peak_bytes <= target_bytes
        plan.check(load_profile(tmp_path / f"profile_{pp_rank}.json"))
        for step in usual:
            rank = step.ranks[pp_rank]
            assert 0 < rank.offloaded_bytes <= rank_plan.moved_bytes
            assert rank.peak_live_activation_bytes <= target_bytes


@pytest.mark.slow
def test_what_costs_nothing_moves_and_a_target_out_of_reach_is_warned_of(plain, tmp_path):
    link = ("offload.simulated.d2h_gbps=1000", "offload.simulated.h2d_gbps=1000")
    policy = ("offload.policy.kind=auto", "offload.policy.most_slowdown_percent=1000")
    status, errors = train(tmp_path / "auto", LONG, OFFLOAD, *policy, *link, "run.trace_step=6")
    assert status == 0, errors
    assert numbers(tmp_path / "auto") == numbers(plain)
    plan = load_plan(tmp_path / "auto/plan.json")
    assert all(rank.moved_bytes > 0 for rank in plan.ranks)
    cost = re.escape(f"{plan.measured}, at most 1000 % is wanted")
    assert re.search(rf"move and .* stay; this costs {cost}", errors), errors
    settings = (OFFLOAD, TARGET, "offload.policy.target_bytes=1KiB")
    status, errors = train(tmp_path / "target", LONG, *settings)
    assert status == 0
    assert "at most 1.00 KiB is wanted" in errors
    assert numbers(tmp_path / "target") == numbers(plain)


@pytest.mark.slow
def test_where_moving_costs_too_much_every_rank_moves_nothing_in_the_end(plain, tmp_path):
    # A link on which a single byte takes longer than any step.
    link = ("offload.simulated.d2h_gbps=1e-9", "offload.simulated.h2d_gbps=1e-9")
    status, errors = train(tmp_path, LONG, OFFLOAD, "offload.policy.kind=auto", *link)
    assert status == 0, errors
    assert numbers(tmp_path) == numbers(plain)
    found, _ = read_steps(tmp_path)
    assert all(rank.offloaded_bytes for rank in found[2].ranks)
    assert not any(rank.offloaded_bytes for rank in found[-1].ranks)
    assert load_plan(tmp_path / "plan.json").moved_bytes == 0
