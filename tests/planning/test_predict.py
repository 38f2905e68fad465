"""Plans in the simulator, and profiles of jobs that never ran."""

from __future__ import annotations

import random

import pytest
from problems import MIB, make_job, random_job

from megatron_offload.errors import ConfigError
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.job import NO_OFFLOAD
from megatron_offload.planning.memory_target import MemoryPlanner, Resources
from megatron_offload.planning.policy import ModulesPolicy, RatioPolicy
from megatron_offload.planning.predict import predictor_of, profiles_of, settings_of
from megatron_offload.planning.profile_file import parse_profile, profile_to_json
from megatron_offload.planning.simulate import simulate

SEGMENT_BYTES = 2 * MIB
"""What is reserved is a multiple of this."""


@pytest.mark.parametrize("seed", range(60))
def test_what_a_profile_of_a_job_says_agrees_with_the_simulator(seed):
    job = random_job(random.Random(seed))
    step = simulate(job, None)
    for profile, rank in zip(profiles_of(job), step.ranks, strict=True):
        assert profile.step_us == step.step_us
        parse_profile(profile_to_json(profile), "it")
        footprint = Footprint.of(profile)
        assert footprint.peak_bytes == rank.peak_reserved_bytes
        assert max(footprint.memory_bytes) == rank.peak_taken_bytes
        assert max(one.allocated_bytes for one in profile.memory) <= rank.peak_device_bytes


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_any_job_keep_their_target_in_the_simulator(seed):
    rng = random.Random(seed)
    job = random_job(rng)
    planner = MemoryPlanner(profiles_of(job), Resources(job.machine))
    lowest, highest = planner.lowest_bytes, planner.highest_bytes
    target_bytes = rng.choice([lowest, rng.randint(lowest, highest)])
    plan = planner.plan((target_bytes,) * len(planner.ranks), "memory_target")
    step = simulate(job, settings_of(plan))
    for own, rank, seen in zip(plan.ranks, step.ranks, planner.ranks, strict=True):
        assert rank.peak_taken_bytes + seen.waste_bytes <= own.predicted_peak_bytes
        assert own.predicted_peak_bytes <= target_bytes
        assert rank.peak_reserved_bytes < own.predicted_peak_bytes + SEGMENT_BYTES


def test_a_rank_that_moves_nothing_has_no_engine():
    job = make_job(ranks=2)
    plan = RatioPolicy(0.0).make_plan(profiles_of(job))
    assert settings_of(plan) == [NO_OFFLOAD] * 2
    assert predictor_of(job)(plan).step_us == simulate(job, None).step_us


def test_what_a_plan_keeps_does_not_move():
    job = make_job(ranks=4, virtual=2, microbatches=8)
    plan = ModulesPolicy(modules=("mlp_*",)).make_plan(profiles_of(job))
    step = simulate(job, settings_of(plan))
    for rank, result in zip(plan.ranks, step.ranks, strict=True):
        assert not set(result.moved) & set(rank.kept)
    assert step.ranks[0].moved


def test_a_plan_for_other_ranks_is_refused():
    plan = RatioPolicy(0.5).make_plan(profiles_of(make_job(ranks=2)))
    with pytest.raises(ConfigError, match="for 2 pipeline ranks, the job has 4"):
        predictor_of(make_job(ranks=4))(plan)
