"""A plan's distances, corrected by the steps that follow it, on the virtual clock."""

from __future__ import annotations

import pytest
from programs import make_config
from virtual_clock import RUN, SCHEDULE, VirtualJob

from megatron_offload.autotune import distances as distance_check
from megatron_offload.autotune import plan_run as plan_run_file
from megatron_offload.autotune.agree import RunPlanner
from megatron_offload.autotune.distances import PlanCorrection
from megatron_offload.autotune.plan_run import correct_plan, plan_run
from megatron_offload.errors import ConfigError
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan import Distances, with_distances

GBPS = 1.0
WITHOUT_US = 2880.0
LINK = {"d2h_gbps": GBPS, "h2d_gbps": GBPS, "both_gbps": GBPS, "node_gbps": 2 * GBPS}


def policy_of(**keys):
    machine = {"ranks_per_node": 1, **LINK}
    return make_config(policy={"kind": "auto", "machine": machine, **keys}).policy


def planned_job():
    """Return a program that follows a plan, with its plan."""
    job = VirtualJob(GBPS).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    plan = RunPlanner(job.manager, recorded.profile, policy_of(), schedule=SCHEDULE).follow()
    job.moved_bytes.clear()
    return job, plan


def follow(job, plan, *distances):
    plan = with_distances(plan, [Distances(*distances)])
    job.manager.follow_plan(plan)
    return plan


class Search:
    """Stands in for the search: asks for what makes no sense, and knows better."""

    seen = []  # noqa: RUF012 - one for all
    best = Distances(300, 400)
    is_frozen = False

    def __init__(self, *_):
        self.seen.clear()

    def follow(self, seen):
        self.seen.append(seen)
        return Distances(100, 200)


def test_what_was_best_stays_and_stalls_are_told(monkeypatch):
    monkeypatch.setattr(distance_check, "Adaptation", Search)
    job, _ = planned_job()
    backend = job.manager.backend
    correct_plan(job.manager, job.step, num_steps=3)
    assert job.manager.backend is backend
    assert len(job.moved_bytes) == 1 + 3, "what the first shows doesn't count"
    assert len(Search.seen) == 3
    # With a hundred bytes in flight at most the device waits for every copy.
    assert Search.seen[-1].release_stall_us > 0
    assert Search.seen[-1].reload_stall_us > 0
    budget = job.manager.budget
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == Search.best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target_bytes", "changes"), [(None, True), (10**6, True), (103_200, False)]
)
def test_a_change_that_misses_the_target_is_taken_back(target_bytes, changes):
    """The plan allows more than the rank should reserve: it was seen to reserve less."""
    job, plan = planned_job()
    budget = job.manager.budget
    job.backend.reserved_bytes = lambda: 10**5 + budget.prefetch_bytes
    follow(job, plan, 60_000, 3_200)  # room for one group that comes back ahead: others are late
    correction = PlanCorrection(job.manager, 8, target_bytes)
    while not correction.is_over:
        with correction.step():
            job.step()
    assert (correction.distances != (60_000, 3_200)) == changes
    assert correction.distances == (budget.max_inflight_bytes, budget.prefetch_bytes)


@pytest.mark.sampled
@pytest.mark.parametrize(("inflight_share", "cost"), [(0.8, 1.064), (0.95, 1.065)])
def test_groups_that_come_late_are_fetched_earlier_within_the_same_memory(inflight_share, cost):
    job, plan = planned_job()
    rank = plan.ranks[0]
    total_bytes = rank.max_inflight_bytes + rank.prefetch_bytes
    prefetch_bytes = int((1 - inflight_share) * total_bytes)
    follow(job, plan, total_bytes - prefetch_bytes, prefetch_bytes)
    job.step()
    assert job.step_us() == pytest.approx(cost * WITHOUT_US, rel=1e-3)
    correct_plan(job.manager, job.step)
    budget = job.manager.budget
    assert budget.max_inflight_bytes + budget.prefetch_bytes <= total_bytes
    assert budget.prefetch_bytes > prefetch_bytes
    assert job.step_us() == pytest.approx(WITHOUT_US)
    assert job.manager.kept == rank.kept


def test_once_frozen_it_looks_no_more_and_takes_its_steps_all_the_same(monkeypatch):
    job, plan = planned_job()
    follow(job, plan, 2**30, 2**30)  # room for everything: nothing is late
    traced = []
    original = distance_check.trace_step

    def trace_step(manager):
        traced.append(len(job.moved_bytes))
        return original(manager)

    monkeypatch.setattr(distance_check, "trace_step", trace_step)
    correction = PlanCorrection(job.manager, 7)
    while not correction.is_over:
        with correction.step():
            job.step()
    assert traced == [1, 2, 3]
    assert len(job.moved_bytes) == 1 + 7
    assert correction.distances == (2**30, 2**30)


def test_a_step_that_fails_may_be_taken_again():
    job, _ = planned_job()
    correction = PlanCorrection(job.manager, 2)
    while not correction.is_over:
        with pytest.raises(ZeroDivisionError), correction.step():
            raise ZeroDivisionError
        with correction.step():
            job.step()
    assert len(job.moved_bytes) == 1 + 2


def test_a_run_that_plans_goes_on_with_what_its_steps_have_corrected(monkeypatch):
    monkeypatch.setattr(distance_check, "Adaptation", Search)
    job = VirtualJob(GBPS).warmed_up()
    policy = policy_of(correction_steps=2, measured_steps=0)
    plan = plan_run(job.manager, job.step, RUN, policy=policy, schedule=SCHEDULE)
    assert len(job.moved_bytes) == 1 + 1 + 2
    rank, budget = plan.ranks[0], job.manager.budget
    assert (rank.max_inflight_bytes, rank.prefetch_bytes) == Search.best
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == Search.best
    job.step()
    assert (budget.max_inflight_bytes, budget.prefetch_bytes) == Search.best


def test_each_pipeline_rank_gets_what_its_first_rank_has_found(monkeypatch):
    answers = [(1, (5, 6)), (0, (1, 2)), (1, (7, 8)), (0, (3, 4))]
    monkeypatch.setattr(plan_run_file, "gather", lambda mine, group: answers)
    found = plan_run_file._gather_by_place((5, 6), 1, None)
    assert found == [[(1, 2), (3, 4)], [(5, 6), (7, 8)]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("keys", "num_steps"),
    [
        ({}, 1 + 8),
        ({"correction_steps": 3}, 1 + 3),
        ({"correction_steps": 0}, 0),
        ({"max_inflight_bytes": "1MiB"}, 0),
        ({"prefetch_bytes": "1MiB"}, 0),
    ],
)
def test_what_somebody_has_set_is_not_corrected(keys, num_steps):
    job = VirtualJob(GBPS).warmed_up()
    policy = policy_of(measured_steps=0, **keys)
    plan_run(job.manager, job.step, RUN, policy=policy, schedule=SCHEDULE)
    assert len(job.moved_bytes) == 1 + num_steps


def test_a_plan_that_sets_the_distances_is_refused_where_a_target_looks_for_them():
    job = VirtualJob(GBPS, device_target_bytes=2**30).warmed_up()
    policy = policy_of(measured_steps=0)
    with pytest.raises(ConfigError, match="leave device_target_bytes out"):
        plan_run(job.manager, job.step, RUN, policy=policy, schedule=SCHEDULE)
