"""Which groups are offloaded: every plan keeps its targets, as simulated, and costs no more than
allowed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from problems import MIB, make_job, random_job

from megatron_offload.core.machine import Machine
from megatron_offload.core.policy_config import ModulesConfig, PlanFileConfig, RatioConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.planning.choice import SLOW_LINK_SHARE, Chooser
from megatron_offload.planning.files import save_plan
from megatron_offload.planning.job import RankSettings, UnitWork
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.planning.profiled_job import profiles_of
from megatron_offload.planning.simulate import settings_of, simulate

NARROW = Machine(both_gbps=8, d2h_gbps=10, h2d_gbps=10, node_gbps=20)


def chooser_of(job, **limits):
    return Chooser(profiles_of(job), job, RankSettings(**limits))


def peaks_of(plan):
    return [rank.predicted_peak_bytes for rank in plan.ranks]


def targets_between(chooser, num):
    lowest, highest = chooser.lowest_bytes, chooser.highest_bytes
    return [lowest + (highest - lowest) * index // num for index in range(num + 1)]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_keeps_its_targets_as_simulated(seed):
    rng = random.Random(seed)
    job = random_job(rng)
    chooser = chooser_of(job)
    for target in targets_between(chooser, 3):
        plan = chooser.under((target,) * job.schedule.num_ranks)
        step = simulate(job, settings_of(plan))
        assert peaks_of(plan) == [rank.peak_reserved_bytes for rank in step.ranks]
        assert max(peaks_of(plan)) <= target
        assert {rank.predicted_step_us for rank in plan.ranks} == {step.step_us}
        for rank, result in zip(plan.ranks, step.ranks, strict=True):
            moving = {choice.key for choice in rank.choices if choice.moves}
            assert moving >= set(result.moved)
            assert all(choice.reason for choice in rank.choices)
            assert (rank.max_inflight_bytes is None) == (not moving)
    assert chooser.under((chooser.highest_bytes,) * job.schedule.num_ranks).moved_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_least_memory_costs_no_more_time_than_allowed(seed):
    rng = random.Random(1000 + seed)
    job = random_job(rng)
    percent = rng.choice([0.0, 0.5, 5.0, 1000.0])
    chooser = chooser_of(job)
    plan = chooser.within(percent)
    most_us = simulate(job).step_us * (1 + percent / 100)
    slow = {name: SLOW_LINK_SHARE * rate for name, rate in job.machine if "gbps" in name and rate}
    slow["p2p_gbps"] = job.machine.p2p_gbps
    for machine in (job.machine, job.machine.model_copy(update=slow)):
        step = simulate(replace(job, machine=machine), settings_of(plan))
        assert step.step_us <= most_us
    assert max(peaks_of(plan)) <= chooser.highest_bytes
    if percent == 1000.0:
        assert max(peaks_of(plan)) <= chooser.lowest_bytes


def test_where_memory_is_free_something_moves():
    """One GPU, several microbatches: only what fills the last layers' time can't be hidden."""
    chooser = chooser_of(make_job(ranks=1, microbatches=4, layers=8))
    plan = chooser.within(0.5)
    assert plan.moved_bytes > 0
    assert max(peaks_of(plan)) < 0.95 * chooser.highest_bytes


def test_a_slower_link_decides_among_plans_that_are_alike():
    job = make_job(ranks=2, microbatches=6, machine=Machine(node_gbps=40.0, gpus_per_node=2))
    free, careful = (chooser_of(job).within(percent) for percent in (1000.0, 0.5))
    assert 0 < careful.moved_bytes < free.moved_bytes


def test_what_a_user_has_set_is_kept():
    chooser = chooser_of(make_job(), prefetch_bytes=700 * MIB)
    plan = chooser.under((chooser.lowest_bytes,) * 2)
    assert {rank.prefetch_bytes for rank in plan.ranks if rank.moved_bytes} == {700 * MIB}
    both = {"max_inflight_bytes": 900 * MIB, "prefetch_bytes": 700 * MIB}
    chooser = chooser_of(make_job(), **both)
    rank = chooser.under((chooser.lowest_bytes,) * 2).ranks[0]
    assert (rank.max_inflight_bytes, rank.prefetch_bytes) == (900 * MIB, 700 * MIB)


def test_reasons_are_plain_words():
    chooser = chooser_of(make_job())
    target = (chooser.lowest_bytes + chooser.highest_bytes) // 2
    found = {
        (choice.moves, choice.reason)
        for rank in chooser.under((target, target)).ranks
        for choice in rank.choices
    }
    what = f"the target of {format_bytes(target)}"
    assert found == {(True, f"moves for {what}"), (False, f"not needed for {what}")}
    kept = {choice.reason for rank in chooser.within(0.0).ranks for choice in rank.choices}
    assert any("the least found for at most 0 % of the step's time" in reason for reason in kept)


def test_a_target_out_of_reach_says_by_how_much():
    chooser = chooser_of(make_job())
    with pytest.raises(TargetError, match=r"rank 0 can't be brought under .* more; raise the tar"):
        chooser.under((chooser.lowest_bytes // 2, 1 << 40))
    chooser.under((chooser.lowest_bytes,) * 2)


def test_targets_profiles_and_plans_have_to_fit_the_job(tmp_path):
    job = make_job()
    with pytest.raises(ConfigError, match="3 memory targets are given for 2 pipeline ranks"):
        chooser_of(job).under((1 << 40,) * 3)
    with pytest.raises(ConfigError, match="profiles are of 1 pipeline ranks, the job has 2"):
        Chooser(profiles_of(make_job(ranks=1)), job)
    save_plan(
        plan_by_rule(RatioConfig(kind="ratio", ratio=0.5), profiles_of(job)), tmp_path / "plan.json"
    )
    config = PlanFileConfig(kind="plan_file", path=str(tmp_path / "plan.json"))
    with pytest.raises(ConfigError, match="it is for 2 pipeline ranks, and there are 4"):
        chooser_of(make_job(ranks=4)).plan(config)


def test_the_same_plan_comes_again():
    job = make_job(ranks=2, virtual=2, microbatches=4)
    chooser = chooser_of(job)
    target = (chooser.lowest_bytes + chooser.highest_bytes) // 2
    assert chooser_of(job).under((target, target)) == chooser.under((target, target))


def recomputing_job(machine):
    """A pipeline in which an activation is recomputed for next to nothing, and a product is not."""
    job = make_job(ranks=2, microbatches=6, machine=machine)

    def changed(work):
        cost = {"mlp_act": ("act", 50.0), "mlp_fc1": ("product", 20_000.0)}.get(work.name)
        if cost is None:
            return work
        unit = UnitWork(cost[0], work.num_bytes // 2, cost[1])
        return replace(work, units=(unit,))

    stages = tuple(replace(stage, groups=tuple(map(changed, stage.groups))) for stage in job.stages)
    return replace(job, stages=stages)


@pytest.mark.slow
def test_what_costs_little_is_recomputed_and_what_costs_much_only_where_the_link_is_the_limit():
    made = []
    for machine in (Machine(), NARROW):
        job = recomputing_job(machine)
        chooser = chooser_of(job)
        target = (chooser.lowest_bytes + chooser.highest_bytes) // 2
        plan = chooser.under((target,) * 2)
        made.append({unit.unit for rank in plan.ranks for unit in rank.units if unit.is_recomputed})
        for rank in plan.ranks:
            assert rank.recomputed_bytes == sum(u.num_bytes for u in rank.units if u.is_recomputed)
    assert "product" not in made[0]
    assert made[1] == {"act", "product"}
    alone = chooser_of(job, recompute=())
    target = ((alone.lowest_bytes + alone.highest_bytes) // 2,) * 2
    us = [one.under(target).ranks[0].predicted_step_us for one in (chooser, alone)]
    assert us[0] < 0.9 * us[1]


def test_only_what_may_be_is_recomputed():
    chooser = chooser_of(recomputing_job(NARROW), recompute=(frozenset({"act"}),))
    plan = chooser.under(((chooser.lowest_bytes + chooser.highest_bytes) // 2,) * 2)
    units = {(unit.unit, unit.is_recomputed) for rank in plan.ranks for unit in rank.units}
    assert ("product", False) in units
    assert ("product", True) not in units
    rule = chooser.plan(ModulesConfig())
    assert rule.ranks[0].units is None
