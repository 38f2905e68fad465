"""A run that weighs its plan by its own steps, on the virtual clock: the memory target holds."""

from __future__ import annotations

import logging

import pytest
from programs import KIB, make_config
from virtual_clock import RUN, SCHEDULE, VirtualJob

from megatron_offload.autotune import plan_run as plan_run_file
from megatron_offload.autotune.agree import RunPlanner
from megatron_offload.autotune.memory import MemoryCheck
from megatron_offload.autotune.plan_run import PlanCheck, check_plan, plan_run
from megatron_offload.errors import TargetError
from megatron_offload.observe.measure import can_weigh, weigh_step
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan_file import parse_plan, plan_to_json

GBPS = 1.0
LINK = {"d2h_gbps": GBPS, "h2d_gbps": GBPS, "both_gbps": GBPS, "node_gbps": 2 * GBPS}
TARGET = 110 * KIB
"""Something over half of what the step takes without offload."""


class WeighedJob(VirtualJob):
    """The same on a device with an allocator, which takes so much of what is live.

    The profile of the step without offload is what the meter counts, so that plans know nothing of
    the share.
    """

    def __init__(self, share):
        super().__init__(GBPS)
        self.share = share
        self.num_trims = 0
        self.backend.reserved_bytes = self.reserved_bytes
        self.backend.trim_device = self.trim_device

    def reserved_bytes(self):
        return int(self.share * self.meter.peak_bytes)

    def trim_device(self):
        self.num_trims += 1
        self.meter.reset_peak()

    def most_reserved_bytes(self, num_steps=3):
        """Return what later steps reserve."""
        self.trim_device()
        for _ in range(num_steps):
            self.step()
        return self.reserved_bytes()


def policy_of(**keys):
    machine = {"ranks_per_node": 1, **LINK}
    given = {"kind": "memory_target", "target_bytes": TARGET, "correction_steps": 0}
    return make_config(policy={**given, "machine": machine, **keys}).policy


def planned(job, **keys):
    return plan_run(job.manager, job.step, RUN, policy=policy_of(**keys), schedule=SCHEDULE)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload.autotune.memory")
    return caplog


def test_a_plan_that_keeps_the_target_stays_after_three_steps(log):
    job = WeighedJob(1.0).warmed_up()
    plan = planned(job)
    assert job.moved_bytes == [0] + [plan.moved_bytes] * 3
    (rank,) = plan.ranks
    assert rank.measured_peak_bytes == job.most_reserved_bytes() <= TARGET
    assert rank.measured_peak_bytes > 15 / 16 * TARGET
    assert job.manager.kept == rank.kept
    assert [text.rpartition(": ")[2] for text in log.messages] == ["kept"]
    assert parse_plan(plan_to_json(plan), "it") == plan
    assert (
        planned(WeighedJob(1.0).warmed_up(), measured_plans=0).ranks[0].measured_peak_bytes is None
    )


def test_where_more_is_reserved_than_planned_the_next_plan_moves_more(log):
    trusting = WeighedJob(1.08).warmed_up()
    first = planned(trusting, measured_plans=0)
    assert trusting.most_reserved_bytes() > TARGET, "the prediction was wrong"
    job = WeighedJob(1.08).warmed_up()
    plan = planned(job)
    assert plan.moved_bytes > first.moved_bytes
    assert [text.rpartition(": ")[2] for text in log.messages] == ["planned again", "kept"]
    assert job.moved_bytes == [0] + [first.moved_bytes] * 3 + [plan.moved_bytes] * 3
    assert 15 / 16 * TARGET < job.most_reserved_bytes() <= TARGET


def test_where_far_less_is_reserved_the_next_plan_moves_less():
    first = planned(WeighedJob(0.85).warmed_up(), measured_plans=0)
    job = WeighedJob(0.85).warmed_up()
    plan = planned(job)
    assert 0 < plan.moved_bytes < first.moved_bytes
    assert 15 / 16 * TARGET <= job.most_reserved_bytes() <= TARGET


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.4, 0.7, 0.9, 1.02, 1.1, 1.3])
def test_the_target_holds_whatever_the_allocator_takes(share):
    job = WeighedJob(share).warmed_up()
    plan = planned(job)
    assert len(job.moved_bytes) <= 1 + 4 * 3
    assert job.most_reserved_bytes() <= TARGET
    assert job.moved_bytes[-1] == plan.moved_bytes
    assert plan.ranks[0].measured_peak_bytes == job.reserved_bytes()


def test_where_no_plan_keeps_the_target_the_nearest_stays_with_a_warning(log):
    job = WeighedJob(10.0).warmed_up()
    plan = planned(job)
    last = log.records[-1]
    assert last.levelno == logging.WARNING
    assert last.getMessage().endswith(" more than wanted stay reserved")
    assert plan.moved_bytes > 0
    assert job.most_reserved_bytes() == plan.ranks[0].measured_peak_bytes > TARGET


def checked(job, weights, plans, target_bytes=TARGET):
    """Hold plans against given weights; return the check, once it is over."""
    asked = []

    def make(targets):
        asked.append(*targets)
        if not plans:
            raise TargetError("too low")
        job.manager.follow_plan(plans[0])
        return plans.pop(0)

    def gather(_):
        return [weights.pop(0)]

    first = plans.pop(0)
    job.manager.follow_plan(first)
    check = PlanCheck(first, [MemoryCheck(job.manager, [target_bytes], 9, make, gather)])
    said = []
    while not check.is_over:
        with check.step():
            job.step()
        said.append(check.note())
    return check, asked, [text for text in said if text]


@pytest.fixture(scope="module")
def three():
    """Three plans of one run, each of which moves more than the one before it."""
    job = VirtualJob(GBPS).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    planner = RunPlanner(job.manager, recorded.profile, policy_of())
    make = [planner.follow((share * TARGET // 100,)) for share in (120, 100, 80)]
    assert make[0].moved_bytes < make[1].moved_bytes < make[2].moved_bytes
    return make


def test_of_those_that_keep_the_target_the_plan_that_moves_least_stays(three):
    job = WeighedJob(1.0).warmed_up()
    # The second has a lot of room, and the third, which was to use it, misses the target.
    weights = [13 * TARGET // 10, TARGET // 2, TARGET + 2]
    check, asked, said = checked(job, weights, [three[1], three[2], three[0]])
    # For the third and less and less of it no plan was found.
    assert asked[2] < asked[3] < asked[4] < asked[1]
    assert len(asked) == 5
    assert check.plan.ranks[0].kept == three[2].ranks[0].kept == job.manager.kept
    assert check.plan.ranks[0].measured_peak_bytes == TARGET // 2
    assert said[-1].endswith("; an earlier plan is followed again: kept")
    job.step()
    assert job.moved_bytes[-1] == three[2].moved_bytes


def test_where_the_lower_target_cannot_be_kept_one_between_is_tried(three):
    """A rank misses its target by little, and hardly more can move."""
    job = WeighedJob(1.0).warmed_up()
    asked, lowest = [], TARGET - TARGET // 50

    def make(targets):
        asked.append(*targets)
        if targets[0] < lowest:
            raise TargetError("too low")
        job.manager.follow_plan(three[2])
        return three[2]

    job.manager.follow_plan(three[1])
    weights = [TARGET + TARGET // 50, TARGET]
    check = MemoryCheck(job.manager, [TARGET], 4, make, lambda _: [weights.pop(0)])
    check = PlanCheck(three[1], [check])
    while not check.is_over:
        with check.step():
            job.step()
        check.note()
    assert len(asked) == 2
    assert asked[0] < lowest <= asked[1] < TARGET
    assert check.plan.ranks[0].measured_peak_bytes == TARGET
    assert check.plan.moved_bytes == three[2].moved_bytes


def test_a_plan_that_was_measured_is_not_measured_again(three):
    job = WeighedJob(1.0).warmed_up()
    weights = [TARGET + 1, TARGET + 2]
    check, asked, _ = checked(job, weights, [three[0], three[1], three[0]])
    assert len(asked) == 2
    assert len(job.moved_bytes) == 2 * 3
    assert check.plan.ranks[0].measured_peak_bytes == TARGET + 1


def test_what_either_of_the_two_steps_reserves_counts(three):
    for shares in ([9.0, 1.5, 1.0], [9.0, 1.0, 1.5]):
        job, told = WeighedJob(1.0).warmed_up(), []
        job.manager.follow_plan(three[0])
        memory = MemoryCheck(
            job.manager, [TARGET], 1, None, lambda most, told=told: told.append(most) or [most]
        )
        check = PlanCheck(three[0], [memory])
        for share in shares:
            with check.step():
                job.share = share
                job.step()
            job.share = 0.0  # what the next step begins with
            check.note()
        assert check.is_over
        assert told == [int(1.5 * job.meter.peak_bytes)]


def test_distances_are_corrected_behind_that_and_weighed_as_well(monkeypatch):
    job, trims = WeighedJob(1.0).warmed_up(), []
    trim = job.backend.trim_device
    monkeypatch.setattr(
        job.backend, "trim_device", lambda: (trims.append(len(job.moved_bytes)), trim())
    )
    planned(job, correction_steps=3)
    assert len(job.moved_bytes) == 1 + 3 + 1 + 3
    # Behind the profiled step; before the second that is weighed, and before each that corrects.
    assert trims == [1, 2, 5, 6, 7]


def test_ranks_of_one_place_count_by_the_fullest(monkeypatch):
    job = WeighedJob(1.0).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    check = check_plan(
        job.manager, recorded.profile, policy_of(measured_plans=1), schedule=SCHEDULE
    )
    monkeypatch.setattr(plan_run_file, "gather", lambda mine, group: [mine, (0, 7), (0, 2**40)])
    while not check.is_over:
        with check.step():
            job.step()
        check.note()
    assert check.plan.ranks[0].measured_peak_bytes == 2**40


# Weighing one step.


def test_a_step_weighs_what_the_device_says_at_both_ends():
    job = WeighedJob(1.0).warmed_up()
    job.num_trims = 0
    said = iter([5, 3, 4, 9])
    job.backend.reserved_bytes = lambda: next(said)
    with weigh_step(job.manager) as weighed:
        assert weighed.reserved_bytes == 0
    assert weighed.reserved_bytes == 5
    with weigh_step(job.manager, empties=True) as weighed:
        assert job.num_trims == 1
    assert weighed.reserved_bytes == 9


def test_where_the_device_says_nothing_the_meter_does_and_its_peak_is_put_back():
    job = VirtualJob(GBPS).warmed_up()
    assert can_weigh(job.manager)
    meter = job.meter
    meter.restore_peak(10**9)
    with weigh_step(job.manager) as weighed:
        job.step()
    assert 0 < weighed.reserved_bytes < 10**6
    assert meter.peak_bytes == 10**9
    job.manager.observers.remove(job.meter)
    assert not can_weigh(job.manager)


def test_where_nobody_tells_a_plan_is_trusted():
    job = VirtualJob(GBPS).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    job.manager.observers.remove(job.meter)
    check = check_plan(job.manager, recorded.profile, policy_of(), schedule=SCHEDULE)
    assert check.is_over
    job.manager.observers.append(job.meter)
