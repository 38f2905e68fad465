"""A run that measures its plan by its own steps, on the virtual clock: the promised limit holds."""

from __future__ import annotations

import logging

import pytest
from programs import make_config
from virtual_clock import RUN, SCHEDULE, VirtualJob

from megatron_offload.autotune.agree import RunPlanner
from megatron_offload.autotune.cost import TimeCheck, most_steps
from megatron_offload.autotune.plan_run import PlanCheck, check_plan, plan_run
from megatron_offload.observe.measure import time_step
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan_file import load_plan, parse_plan, plan_to_json, save_plan

PLANNED = 1.0
"""GB/s that plans are made with."""

WITHOUT_US = 2880.0


def policy(machine=None, correction_steps=0, **keys):
    link = {
        "d2h_gbps": PLANNED,
        "h2d_gbps": PLANNED,
        "both_gbps": PLANNED,
        "node_gbps": 2 * PLANNED,
    }
    machine = {"ranks_per_node": 1, **(machine or link)}
    return make_config(
        policy={"kind": "auto", "machine": machine, "correction_steps": correction_steps, **keys}
    ).policy


def planned(job, **keys):
    return plan_run(job.manager, job.step, RUN, policy=policy(**keys), schedule=SCHEDULE)


def usual_slowdown_percent(job):
    """Return what the steps from here on cost."""
    with time_step(job.manager, moves=False) as bare:
        job.step()
    job.step()
    return 100 * (job.step_us() / bare.step_us - 1)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload.autotune.cost")
    return caplog


def test_a_plan_that_keeps_to_the_limit_stays(log, tmp_path):
    job = VirtualJob(PLANNED).warmed_up()
    plan = planned(job)
    moved_bytes = plan.moved_bytes
    assert moved_bytes > 0
    # The profiled step, one of each kind that doesn't count, and three pairs.
    assert job.moved_bytes == [0] + [0, moved_bytes] * 4
    cost = plan.measured
    assert cost.num_pairs == 3
    assert cost.without_us == pytest.approx(WITHOUT_US)
    assert cost.with_us == pytest.approx(plan.ranks[0].predicted_step_us, rel=1e-3)
    assert cost.slowdown_percent <= 0.5
    assert usual_slowdown_percent(job) == pytest.approx(cost.slowdown_percent)
    assert job.manager.kept == plan.ranks[0].kept
    (said,) = log.messages
    assert said == f"the plan costs {cost}, at most 0.5 % is wanted: kept"
    assert parse_plan(plan_to_json(plan), "it") == plan
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").measured == cost


def test_a_plan_is_corrected_before_it_is_measured():
    job = VirtualJob(PLANNED).warmed_up()
    plan = planned(job, correction_steps=2)
    assert job.moved_bytes == [0] + [plan.moved_bytes] * 3 + [0, plan.moved_bytes] * 4
    assert plan.measured.num_pairs == 3


@pytest.mark.slow
def test_where_copies_are_slower_than_planned_a_later_plan_keeps_to_the_limit(log):
    job = VirtualJob(0.135 * PLANNED).warmed_up()
    trusting = VirtualJob(0.135 * PLANNED).warmed_up()
    first = planned(trusting, measured_steps=0)
    assert first.measured is None
    assert usual_slowdown_percent(trusting) > 0.5, "the prediction was wrong"
    plan = planned(job)
    said = [text.rpartition("again, for ")[2] for text in log.messages]
    assert said[:3] == ["fewer bytes", "more bytes", "fewer bytes"]
    assert said[3].endswith(": kept")
    moved = [num_bytes for num_bytes in job.moved_bytes if num_bytes]
    first_bytes, second_bytes, third_bytes, last_bytes = moved[::4]
    assert (first_bytes, last_bytes) == (first.moved_bytes, plan.moved_bytes)
    assert 0.4 * first_bytes < second_bytes < last_bytes < third_bytes <= 0.75 * first_bytes
    expected = [0] + [0, first_bytes] * 4
    for later_bytes in (second_bytes, third_bytes, last_bytes):
        expected += [later_bytes] + [0, later_bytes] * 3
    assert job.moved_bytes == expected
    assert plan.measured.slowdown_percent <= 0.5
    assert usual_slowdown_percent(job) <= 0.5
    assert job.moved_bytes[-1] == last_bytes


@pytest.mark.slow
@pytest.mark.parametrize("makes_last", [True, False])
def test_where_those_that_move_more_are_too_slow_an_earlier_plan_is_followed_again(makes_last):
    job = VirtualJob(PLANNED).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    planner = RunPlanner(job.manager, recorded.profile, policy(), schedule=SCHEDULE)
    plans = [planner.follow(most_bytes) for most_bytes in (None, 94_000, 140_000, 117_000)]
    followed = iter(plans)
    slow = {plans[0].moved_bytes, plans[2].moved_bytes}

    def make(most_bytes):
        plan = next(followed)
        if plan is plans[3] and not makes_last:
            plan = plans[1]  # there is none between
        job.manager.follow_plan(plan)
        return plan

    def step_us(_):
        return 1100.0 if job.moved_bytes[-1] in slow else 1000.0

    slow.add(plans[3].moved_bytes)
    check = PlanCheck(make(None), [TimeCheck(job.manager, 0.5, 1, make, step_us)])
    said = []
    while not check.is_over:
        with check.step():
            job.step()
        said.append(check.note())
    assert "an earlier plan is followed again, which costs +0.00 %" in said[-1]
    job.step()
    assert job.moved_bytes[-1] == check.plan.moved_bytes == plans[1].moved_bytes
    assert check.plan.measured.slowdown_percent == 0.0


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.02, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("percent", [0.0, 0.5, 10.0])
def test_the_limit_holds_whatever_the_link_gives(share, percent):
    job = VirtualJob(share * PLANNED).warmed_up()
    plan = planned(job, most_slowdown_percent=percent, measured_steps=1)
    assert len(job.moved_bytes) <= 1 + most_steps(1)
    assert usual_slowdown_percent(job) <= percent + 1e-9
    assert job.moved_bytes[-1] == plan.moved_bytes


@pytest.mark.slow
def test_where_every_plan_is_too_slow_nothing_moves_and_the_numbers_are_said(log):
    job = VirtualJob(0.02 * PLANNED).warmed_up()
    plan = planned(job)
    assert plan.moved_bytes == 0
    assert plan.measured is None
    assert {rank.predicted_step_us for rank in plan.ranks} == {None}
    last = log.records[-1]
    assert last.levelno == logging.WARNING
    assert last.getMessage().endswith("nothing moves from here on: no plan was fast enough")
    reasons = set(job.manager.kept.values())
    (reason,) = [each for each in reasons if each.startswith("moving costs too much time: +")]
    assert reason.endswith(" % of the step was measured, at most 0.5 % is wanted")
    assert parse_plan(plan_to_json(plan), "it") == plan
    job.step()
    assert job.moved_bytes[-1] == 0


@pytest.mark.parametrize(("gbps", "steps"), [(PLANNED, 0), (1e-6, 3)])
def test_a_prediction_that_is_trusted_and_a_plan_that_moves_nothing_need_no_steps(gbps, steps):
    job = VirtualJob(gbps).warmed_up()
    link = {"d2h_gbps": gbps, "h2d_gbps": gbps, "both_gbps": gbps, "node_gbps": 2 * gbps}
    plan = planned(job, measured_steps=steps, machine=link)
    assert (plan.moved_bytes > 0) == (gbps == PLANNED)
    assert job.moved_bytes == [0]
    assert plan.measured is None


def test_memory_is_handed_back_when_the_last_step_was_measured(monkeypatch):
    job = VirtualJob(PLANNED).warmed_up()
    trimmed = []
    monkeypatch.setattr(job.backend, "trim_device", lambda: trimmed.append(len(job.moved_bytes)))
    planned(job)
    assert trimmed == [1, 9], "behind the profile, and behind the last pair; not between"


def test_a_measured_step_that_fails_may_be_taken_again():
    job = VirtualJob(PLANNED).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    check = check_plan(job.manager, recorded.profile, policy(), schedule=SCHEDULE)
    while not check.is_over:
        with pytest.raises(ZeroDivisionError), check.step():
            raise ZeroDivisionError
        with check.step():
            job.step()
        check.note()
    assert check.plan.measured.slowdown_percent <= 0.5
    assert job.moved_bytes == [0] + [0, check.plan.moved_bytes] * 4
