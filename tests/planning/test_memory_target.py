"""Every rank within its target, together on one node."""

from __future__ import annotations

import re

import pytest
from problems import MIB, make_job, profiles
from pydantic import ByteSize, TypeAdapter

from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError
from megatron_offload.planning.greedy import solve_greedy
from megatron_offload.planning.memory_target import MemoryPlanner, MemoryTargetPolicy, Resources
from megatron_offload.planning.predict import predictor_of, profiles_of

PROFILES = profiles(ranks=4, virtual=2, microbatches=8)


@pytest.fixture(scope="module")
def planner():
    return MemoryPlanner(PROFILES)


def targets(planner, num):
    lowest, highest = planner.lowest_bytes, planner.highest_bytes
    return [lowest + (highest - lowest) * step // num for step in range(num + 1)]


def test_no_rank_exceeds_its_target_when_simulated(planner):
    predict = predictor_of(make_job(ranks=4, virtual=2, microbatches=8))
    for target_bytes in targets(planner, 5):
        plan = planner.plan((target_bytes,) * 4, "memory_target")
        predicted = [rank.predicted_peak_bytes for rank in plan.ranks]
        for simulated, own in zip(predict(plan).peak_bytes, predicted, strict=True):
            assert simulated <= own <= target_bytes


@pytest.mark.slow
def test_a_higher_target_never_moves_more_and_never_gives_less_room(planner):
    plans = [planner.plan((target,) * 4, "memory_target") for target in targets(planner, 8)]
    for rank in range(4):
        moved = [plan.ranks[rank].moved_bytes for plan in plans]
        assert moved == sorted(moved, reverse=True)
        rooms = [
            one.max_inflight_bytes + one.prefetch_bytes
            for one in (plan.ranks[rank] for plan in plans)
            if one.moved_bytes
        ]
        largest = max(choice.num_bytes for choice in plans[0].ranks[rank].choices)
        assert all(
            min(plan.ranks[rank].max_inflight_bytes, plan.ranks[rank].prefetch_bytes) >= largest
            for plan in plans
            if plan.ranks[rank].moved_bytes
        )
        assert rooms == sorted(rooms)
        assert rooms[0] < rooms[-1]
    assert all(rank.moved_bytes == 0 for rank in plans[-1].ranks)
    assert all(rank.max_inflight_bytes is None for rank in plans[-1].ranks)


def test_what_others_keep_a_rank_can_use(planner):
    machine = Machine()
    lowest, _, middle, *_ = targets(planner, 4)
    slow = MemoryPlanner(PROFILES, Resources(Machine(node_gbps=12.0)))
    tight = slow._links_gbps((lowest,) * 4)
    loose = slow._links_gbps((lowest, *(slow.highest_bytes,) * 3))
    assert loose[0] == pytest.approx(6.0), "all of the node's, each way"
    assert 12 / 2 / 4 <= tight[0] < loose[0]
    assert planner._links_gbps((middle,) * 4)[0] <= machine.both_gbps


def test_ranks_on_other_nodes_take_nothing():
    apart = MemoryPlanner(PROFILES, Resources(Machine(node_gbps=12.0, ranks_per_node=1)))
    assert apart._links_gbps((apart.lowest_bytes,) * 4) == [pytest.approx(6.0)] * 4
    shared = MemoryPlanner(PROFILES, Resources(Machine(node_gbps=12.0, ranks_per_node=1), 2))
    assert shared._links_gbps((shared.lowest_bytes,) * 4) == [pytest.approx(3.0)] * 4


def test_targets_may_differ_by_rank():
    lowest = MemoryPlanner(PROFILES).lowest_bytes
    given = tuple(lowest + rank * 1024 * MIB for rank in range(4))
    plan = MemoryTargetPolicy(given).make_plan(PROFILES[::-1])
    assert plan.policy == "memory_target"
    for rank, target_bytes in zip(plan.ranks, given, strict=True):
        assert rank.predicted_peak_bytes <= target_bytes


def test_a_number_of_targets_that_is_not_that_of_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="2 memory targets are given for 4 pipeline ranks"):
        MemoryTargetPolicy((1, 2)).make_plan(PROFILES)


def test_a_target_that_is_too_low_is_refused_with_rank_and_distance(planner):
    with pytest.raises(ConfigError) as caught:
        planner.plan((planner.lowest_bytes - 2**30,) * 4, "memory_target")
    found = re.fullmatch(
        r"pipeline rank 0 can't be brought under (.+): with all that can move in time it still "
        r"takes (.+), (.+) more; raise the target, .*",
        str(caught.value),
    )
    target, least, missing = map(TypeAdapter(ByteSize).validate_python, found.groups())
    assert least == pytest.approx(target + missing, abs=20 * MIB)
    assert 2**29 < missing <= 2**30


def test_a_given_room_is_kept_to():
    resources = Resources(max_inflight_bytes=700 * MIB, prefetch_bytes=900 * MIB)
    planner = MemoryPlanner(PROFILES, resources)
    assert planner.lowest_bytes > MemoryPlanner(PROFILES).lowest_bytes
    plan = planner.plan((planner.lowest_bytes,) * 4, "memory_target")
    for rank in plan.ranks:
        assert (rank.max_inflight_bytes, rank.prefetch_bytes) == (700 * MIB, 900 * MIB)


def test_reasons_tell_why(planner):
    slow = profiles_of(make_job(ranks=2, microbatches=4, machine=Machine(node_gbps=24.0)))
    middle = MemoryPlanner(slow, Resources(Machine(node_gbps=24.0)))
    plan = middle.plan((targets(middle, 3)[1],) * 2, "memory_target")
    reasons = {choice.reason for rank in plan.ranks for choice in rank.choices}
    assert any(reason.startswith("not needed for") for reason in reasons)
    assert any(reason == "memory is low enough without it" for reason in reasons)
    assert any(reason.startswith("needed again after") for reason in reasons)


@pytest.mark.slow
def test_the_greedy_choice_serves_as_well(planner):
    quick = MemoryPlanner(PROFILES, solver=solve_greedy)
    for target_bytes in targets(planner, 4):
        exact = planner.plan((target_bytes,) * 4, "memory_target")
        greedy = quick.plan((target_bytes,) * 4, "memory_target")
        for one, other in zip(exact.ranks, greedy.ranks, strict=True):
            assert other.predicted_peak_bytes <= target_bytes
            assert one.moved_bytes <= other.moved_bytes <= 1.1 * one.moved_bytes
