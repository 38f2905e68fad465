"""The most memory for (almost) no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import make_job, profiles

from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError
from megatron_offload.planning.auto import AutoPlanner, AutoPolicy, Prediction
from megatron_offload.planning.memory_target import MemoryPlanner, Resources
from megatron_offload.planning.predict import predictor_of, profiles_of

SLOW = Resources(Machine(node_gbps=40.0, ranks_per_node=2))


def slow_job():
    return make_job(ranks=2, microbatches=6, machine=SLOW.machine)


@pytest.mark.sampled
@pytest.mark.parametrize("percent", [0.0, 0.5, 5.0, 1000.0])
def test_a_plan_is_never_predicted_to_be_slower_than_allowed(percent):
    predict = predictor_of(slow_job())
    plan = AutoPolicy(predict, percent, SLOW).make_plan(profiles_of(slow_job()))
    without = predict(MemoryPlanner(profiles_of(slow_job())).plan((2**60,) * 2, "auto"))
    found = predict(plan)
    assert found.step_us <= without.step_us * (1 + percent / 100)
    assert [rank.predicted_step_us for rank in plan.ranks] == [found.step_us] * 2
    assert tuple(rank.predicted_peak_bytes for rank in plan.ranks) == found.peak_bytes
    assert plan.policy == "auto"


def test_the_lowest_target_that_is_fast_enough_is_found():
    """With a prediction by a plain rule: below the knee each percent of the range costs 1 %."""
    runs = profiles(ranks=1, microbatches=8, name="gpipe")
    planner = MemoryPlanner(runs)
    range_bytes = planner.highest_bytes - planner.lowest_bytes
    knee_bytes = planner.lowest_bytes + range_bytes / 2

    def predict(plan):
        peak_bytes = plan.ranks[0].predicted_peak_bytes
        return Prediction(100 * (1 + max(0, knee_bytes - peak_bytes) / range_bytes), (peak_bytes,))

    plan = AutoPolicy(predict, 1.0).make_plan(runs)
    limit_bytes = knee_bytes - 0.01 * range_bytes
    assert plan.ranks[0].predicted_peak_bytes >= limit_bytes
    lower = planner.plan((int(limit_bytes - range_bytes / 256),), "auto")
    assert predict(lower).step_us > 101, "the next target is too slow"


@pytest.mark.slow
def test_bytes_that_may_move_bound_a_plan_whatever_is_predicted():
    runs = profiles_of(slow_job())
    predict = predictor_of(slow_job())
    search = AutoPlanner(runs, predict, 1000.0, SLOW)
    free = search.plan()
    assert free.moved_bytes == sum(rank.moved_bytes for rank in free.ranks) > 0
    assert search.plan(free.moved_bytes) == free
    moved_bytes, peaks = [free.moved_bytes], [max(predict(free).peak_bytes)]
    for share in (0.75, 0.6, 0.0):
        plan = search.plan(int(share * free.moved_bytes))
        assert plan.moved_bytes <= share * free.moved_bytes
        moved_bytes.append(plan.moved_bytes)
        peaks.append(max(predict(plan).peak_bytes))
    assert moved_bytes == sorted(moved_bytes, reverse=True)
    assert moved_bytes[2] > 0.5 * free.moved_bytes, "no less than has to be"
    assert peaks == sorted(peaks)


@pytest.mark.slow
def test_a_plan_has_to_be_fast_with_a_slower_link_too():
    job, runs = slow_job(), profiles_of(slow_job())
    predict = predictor_of(job)
    slower = replace(
        job, machine=job.machine.model_copy(update={"node_gbps": 0.8 * job.machine.node_gbps})
    )
    without = predict(MemoryPlanner(runs).plan((2**60,) * 2, "auto"))
    limit_us = without.step_us * 1.005

    def bold(plan):
        return predict(plan)._replace(slow_link_step_us=None)

    fast, robust = (AutoPolicy(one, 0.5, SLOW).make_plan(runs) for one in (bold, predict))
    assert 0 < robust.moved_bytes < fast.moved_bytes
    assert predictor_of(slower)(robust).step_us <= limit_us < predictor_of(slower)(fast).step_us
    assert predict(robust).slow_link_step_us == predictor_of(slower)(robust).step_us


def test_where_nothing_is_free_nothing_moves():
    def predict(plan):
        moved_bytes = sum(rank.moved_bytes for rank in plan.ranks)
        return Prediction(100.0 + moved_bytes, tuple(r.predicted_peak_bytes for r in plan.ranks))

    plan = AutoPolicy(predict).make_plan(profiles(ranks=2, microbatches=2))
    assert all(rank.moved_bytes == 0 for rank in plan.ranks)


def test_times_with_waits_for_copies_are_no_ground_for_a_promise():
    runs = [
        replace(run, offloaded_bytes=7, counts_what_moved=True) for run in profiles_of(slow_job())
    ]
    with pytest.raises(ConfigError, match="moved 14 bytes, and its times hold what it waited"):
        AutoPolicy(predictor_of(slow_job())).make_plan(runs)


@pytest.mark.slow
def test_no_plan_is_predicted_twice_by_one_search():
    predict, seen = predictor_of(slow_job()), []

    def count(plan):
        seen.append(plan)
        return predict(plan)

    runs = profiles_of(slow_job())
    search = AutoPlanner(runs, count, 1000.0, SLOW)
    free = search.plan()
    num_first = len(seen)
    assert search.plan() == free
    assert len(seen) == num_first
    bounded = search.plan(free.moved_bytes // 2)
    assert num_first < len(seen) < 2 * num_first
    again = AutoPlanner(runs, predict, 1000.0, SLOW).plan(free.moved_bytes // 2)
    assert bounded == again, "as a search of its own"
