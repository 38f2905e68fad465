"""Runs that find by their own steps what to move, on the virtual clock: promises hold."""

from __future__ import annotations

import logging

import pytest
from programs import KIB, run_step
from virtual_clock import ORDER, VirtualJob

from megatron_offload.autotune.loop import tune
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Observer
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.files import PLANS, load_plan, save_plan

pytestmark = pytest.mark.usefixtures("few_candidates")

TARGET = 110 * KIB
"""Something over half of what the step takes without offload."""

COMPUTE_US = 2880.0


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload.autotune.loop")
    return caplog


def settled(job, *, most_steps=12, **keys):
    """Take steps until nothing more is looked at; return the loop."""
    loop = tune(job.manager, **keys)
    while not loop.is_settled:
        job.step()
        assert len(job.moved_bytes) <= most_steps
    return loop


@pytest.fixture(scope="module")
def expected():
    """The plan of a job whose steps nothing disturbs."""
    return settled(VirtualJob(0.1)).plan


def cost_percent(job):
    return 100 * (job.step_us() / COMPUTE_US - 1)


# Time, which is the default.


@pytest.mark.sampled
@pytest.mark.parametrize("gbps", [0.1, 0.05, 10.0, 1.0, 0.2, 0.02, 0.001])
def test_whatever_the_link_gives_the_default_costs_no_more_than_it_may(gbps, log):
    job = VirtualJob(gbps)
    loop = settled(job)
    everything_bytes, num_steps = job.moved_bytes[3], len(job.moved_bytes)
    assert cost_percent(job) <= 1 + 1e-9
    job.step()
    assert job.moved_bytes[-1] == job.moved_bytes[-2] <= loop.plan.moved_bytes + 2048
    assert (job.moved_bytes[-1] > 0.4 * everything_bytes) == (gbps >= 0.1)
    assert job.manager.observers == [job.meter], "nobody looks any more"
    assert log.messages == [f"auto: {loop.said}"]
    assert PLANS.parse(PLANS.to_json(loop.plan), "it") == loop.plan
    again = VirtualJob(gbps)
    assert settled(again).plan == loop.plan
    assert len(again.moved_bytes) == num_steps


def test_the_steps_before_there_is_a_plan_move_everything_and_no_step_is_taken_without():
    job = VirtualJob(0.1)
    loop = settled(job)
    first, second, third, fourth, *later = job.moved_bytes
    assert first >= second == third == fourth
    assert later
    assert all(0 < moved <= third for moved in later)
    assert loop.plan.measured.slowdown_percent == pytest.approx(cost_percent(job), abs=0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("percent", [10.0, 0.0, 0.5])
def test_a_limit_of_ones_own_is_kept(percent):
    policy = {"kind": "auto", "most_slowdown_percent": percent}
    job = VirtualJob(0.1, policy=policy)
    settled(job)
    assert cost_percent(job) <= percent + 1e-9


def test_without_plans_to_measure_the_prediction_is_trusted():
    job = VirtualJob(0.3, policy={"kind": "auto", "measured_plans": 0})
    loop = settled(job, most_steps=5)
    assert loop.plan.measured is None
    assert loop.said.endswith("as predicted")
    assert loop.plan.moved_bytes > 0


def test_what_the_device_cannot_hold_moves_whatever_that_costs(log):
    job = VirtualJob(0.02)
    job.backend.capacity_bytes = lambda: 120 * KIB
    loop = settled(job)
    assert loop.plan.ranks[0].predicted_peak_bytes <= 120 * KIB
    assert loop.plan.moved_bytes > 0
    assert log.records[-1].levelno == logging.WARNING


def test_what_a_plan_needs_no_more_is_unpinned_soon_and_not_in_the_middle_of_a_run():
    job = VirtualJob(0.1, host_slab_bytes=16 * KIB)
    settled(job)
    for _ in range(2):
        job.step()
    pinned_bytes = job.manager.host_pool.stats.slab_bytes_total
    assert pinned_bytes < 0.7 * job.manager.host_pool.stats.peak_slab_bytes
    for _ in range(20):
        job.step()
    assert job.manager.host_pool.stats.slab_bytes_total == pinned_bytes


class Launches(Observer):
    """The host's time for each group, which no copy and no wait shows."""

    needs_groups = False

    def __init__(self, backend, group_us):
        self.backend, self.group_us = backend, group_us

    def group_commits(self, group, *, is_delayed):
        self.backend.advance_compute(self.group_us)


def host_bound_job(group_us, **settings):
    """Return a job on a device that can hold all of it, and whose host is the limit."""
    job = VirtualJob(1.0, **settings)
    job.manager.observers[:] = [Launches(job.backend, group_us)]  # and nobody counts its bytes
    job.backend.capacity_bytes = lambda: 1 << 30
    return job


def test_where_the_host_has_no_time_for_it_nothing_moves_and_nothing_is_recorded(log):
    job = host_bound_job(10.0)
    loop = settled(job, most_steps=17)
    assert loop.plan.moved_bytes == 0
    assert job.manager.is_passing
    assert job.manager.host_pool.stats.slab_bytes_total == 0
    assert job.step_us() == pytest.approx(COMPUTE_US)
    stats = job.manager.last_step
    assert (stats.num_groups, stats.offloaded_bytes) == (48, 0)
    reasons = {why for group in stats.by_name.values() for why in group.kept_bytes_by_reason}
    assert all(why.startswith("not needed for") for why in reasons), "it says why all stays"
    assert stats.kept_bytes == sum(group.num_bytes for group in job.manager.last_profile.groups)
    assert "the quickest that was tried costs 1.44 %" in log.messages[-1]
    with profile_step(job.manager) as recorded:
        job.step()
    assert len(recorded.profile.groups) == 48, "who wants to see groups does"


def test_what_the_host_takes_of_a_step_counts_beyond_the_noise_of_steps():
    job = host_bound_job(0.5)
    assert settled(job).plan.moved_bytes > 0


def test_where_the_host_has_little_time_some_moves_and_what_stays_costs_nothing():
    job = host_bound_job(8.0, policy={"kind": "auto", "most_slowdown_percent": 2.0})
    loop = settled(job, most_steps=17)
    plan = loop.plan.ranks[0]
    assert 0 < plan.moved_bytes < 0.2 * plan.saved_bytes
    assert job.step_us() < 1.05 * COMPUTE_US, "all of 48 groups would take an eighth more"
    assert len(job.manager.decisions.passed) == 0, "the step is over"
    assert job.manager.last_step.num_groups == 48
    assert job.manager.last_step.kept_bytes == plan.saved_bytes - plan.moved_bytes


def test_of_steps_that_other_work_delays_the_quickest_counts():
    policy = {"kind": "auto", "most_slowdown_percent": 2.0}
    expected = settled(host_bound_job(8.0, policy=policy), most_steps=17).plan.moved_bytes
    job = host_bound_job(8.0, policy=policy)
    loop, launches = tune(job.manager), job.manager.observers[0]
    for number in range(17):
        launches.group_us = 8.0 if number < 6 or number % 2 else 60.0
        job.step()
    assert loop.is_settled
    assert loop.plan.moved_bytes == expected


def for_replays(gbps, launch_us=150.0, slow_gbps=None, capacity_bytes=1 << 30, **settings):
    """Return a job whose plans are for replays; copies take some of its memory's bandwidth."""
    job = VirtualJob(gbps, whole_step_graph=True, **settings)
    pause = job.backend.advance_compute
    if slow_gbps is not None:
        job.slowed_by_copies(slow_gbps)
    job.launched_by_a_host(launch_us)
    job.backend.pause = lambda: pause(1000.0)
    job.backend.capacity_bytes = lambda: capacity_bytes
    return job


def replayed_us(job, plan):
    """Return what a replay takes of a step that was captured with a plan."""
    job.warmed_up().manager.follow_plan(plan)
    job.manager.observers.clear()  # nobody may look at what is captured
    job.backend.is_capturing = lambda: True
    job.step()
    return job.step_us()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "policy", [{"kind": "memory_target", "target_bytes": TARGET}, {"kind": "auto"}]
)
def test_for_replays_the_plan_is_that_of_a_host_that_takes_no_time(policy, log):
    expected = settled(for_replays(0.1, 0.0, policy=policy), most_steps=14).plan
    loop = settled(for_replays(0.1, policy=policy), most_steps=14)
    assert loop.plan.measured is None
    assert "as predicted" in loop.said
    assert loop.plan.moved_bytes > 0
    step_us = replayed_us(VirtualJob(0.1), loop.plan)
    assert step_us == pytest.approx(loop.plan.ranks[0].predicted_step_us)
    assert step_us <= (1.01 + 1e-9 if policy["kind"] == "auto" else 1.2) * COMPUTE_US
    assert loop.plan.moved_bytes == pytest.approx(expected.moved_bytes, rel=0.3)


def test_for_replays_it_is_known_what_copies_take_of_kernels():
    """All could move behind compute, where it costs 5 %; 1 % is wanted."""
    everything = settled(for_replays(10.0), most_steps=14).plan
    assert everything.moved_bytes == everything.ranks[0].saved_bytes
    plan = settled(for_replays(10.0, slow_gbps=2.6), most_steps=14).plan
    costs = []
    for one in (everything, plan):
        step_us = replayed_us(VirtualJob(10.0).slowed_by_copies(2.6), one)
        costs.append(100 * (step_us / COMPUTE_US - 1))
    assert costs[0] > 4
    assert 0.5 <= costs[1] <= 1.0
    assert step_us == pytest.approx(plan.ranks[0].predicted_step_us, rel=1e-3)


@pytest.mark.parametrize("share", [1.1, 1.3])
def test_for_replays_a_step_without_offload_is_taken_where_it_fits(share):
    job = for_replays(0.1, capacity_bytes=1 << 30)
    settled(job, most_steps=14)
    needed_bytes = job.manager.tuner._search._chooser.highest_bytes
    job = for_replays(0.1, capacity_bytes=int(share * needed_bytes))
    settled(job, most_steps=14)
    assert (min(job.moved_bytes[:8]) == 0) == (share > 1.2)


@pytest.mark.parametrize("launch_us", [150.0, 1.0])
@pytest.mark.parametrize("whole_step_graph", [False, True])
def test_a_capture_with_a_plan_of_a_slow_host_is_warned_of_once(launch_us, whole_step_graph, log):
    job = VirtualJob(0.1, whole_step_graph=whole_step_graph).launched_by_a_host(launch_us)
    settled(job)
    job.manager.observers.clear()  # nobody may look at what is captured
    job.backend.is_capturing = lambda: True
    for _ in range(2):
        job.step()
    warned = [one for one in log.records if "set whole_step_graph" in one.message]
    assert len(warned) == (launch_us > 100 and not whole_step_graph)


def test_where_the_device_is_the_limit_replays_take_what_was_measured():
    job = VirtualJob(0.1, whole_step_graph=True).launched_by_a_host(1.0)
    assert settled(job).plan.measured is not None


def test_a_program_that_changes_while_nothing_moves_is_seen_to_have_changed(log):
    job = host_bound_job(10.0)
    settled(job, most_steps=17)
    job.manager.step_number = 62
    for _ in range(5):
        run_step(job.model[:2], job.manager, ORDER)
    assert "the program has changed" in log.text


# Memory.


class WeighedJob(VirtualJob):
    """The same on a device with an allocator, which takes so much of what is live."""

    def __init__(self, share, **settings):
        super().__init__(1.0, **settings)
        self.backend.reserved_bytes = lambda: int(share * self.meter.peak_bytes)
        self.backend.trim_device = self.meter.reset_peak

    def most_reserved_bytes(self, num_steps=3):
        """Return what later steps reserve."""
        self.meter.reset_peak()
        for _ in range(num_steps):
            self.step()
        return self.backend.reserved_bytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [1.02, 1.08, 0.85, 0.4, 0.7, 1.0, 1.3])
def test_a_target_is_kept_whatever_the_allocator_takes(share, log):
    policy = {"kind": "memory_target", "target_bytes": TARGET}
    trusting = WeighedJob(share, policy={**policy, "measured_plans": 0})
    first = settled(trusting).plan
    job = WeighedJob(share, policy=policy)
    plan = settled(job).plan
    assert first.ranks[0].measured_peak_bytes is None
    assert job.most_reserved_bytes() <= TARGET
    assert plan.ranks[0].measured_peak_bytes <= TARGET
    if share > 1.05:
        assert trusting.most_reserved_bytes() > TARGET, "the prediction was wrong"
        assert plan.moved_bytes > first.moved_bytes
    if share < 0.9:
        assert plan.moved_bytes < first.moved_bytes
    assert all(record.levelno == logging.INFO for record in log.records)


def test_a_target_that_cannot_be_kept_is_warned_of_and_the_run_goes_on(log):
    job = VirtualJob(1.0, policy={"kind": "memory_target", "target_bytes": 8 * KIB})
    loop = settled(job)
    assert log.records[-1].levelno == logging.WARNING
    assert "at most 8.00 KiB is wanted" in loop.said
    # As little as there can be: everything moves, in the smallest room.
    assert loop.plan.moved_bytes == loop.plan.ranks[0].saved_bytes


# When no steps are looked at, and when they are looked at anew.


@pytest.mark.parametrize(
    "settings",
    [
        {"fraction": 1.0},
        {"delta_bytes_across_pp_ranks": 0},
        {"policy": {"kind": "modules"}},
        {"policy": {"kind": "ratio", "ratio": 0.5}},
        {"enabled": False},
    ],
)
def test_what_a_user_sets_is_what_happens(settings):
    job = VirtualJob(0.02, **settings)
    loop = tune(job.manager)
    for _ in range(5):
        run_step(job.model, job.manager, ORDER)
        assert (loop.is_settled, loop.plan, job.manager.observers) == (True, None, [job.meter])


@pytest.mark.parametrize("policy", [None, {"kind": "memory_target", "target_bytes": "1KiB"}])
def test_on_a_device_without_a_clock_everything_goes_on_moving(policy, log):
    job = VirtualJob(1.0, group_us=0.0, **({"policy": policy} if policy else {}))
    loop = settled(job, most_steps=4)
    for _ in range(2):
        job.step()
    assert loop.plan is None
    assert job.moved_bytes[-1] == job.moved_bytes[2] > 0
    assert ["has no clock" in text for text in log.messages] == ([True] if policy else [])


def test_where_nothing_comes_back_nothing_is_planned_and_it_is_said(log):
    job = VirtualJob(0.1, min_tensor_bytes=1 << 30)
    loop = settled(job, most_steps=8)
    assert loop.plan is None
    assert log.messages == [f"auto: {loop.said}"]


def test_others_wait_for_no_rank_until_it_has_groups_and_for_an_evaluation_later(monkeypatch):
    said = []
    monkeypatch.setattr("megatron_offload.autotune.loop.stand_aside", said.append)
    job = VirtualJob(0.1)
    tune(job.manager)
    for has_groups, expected in ((False, [1]), (False, [1]), (True, [1, -1]), (False, [1, -1])):
        (job.manager.enable_offload if has_groups else job.manager.disable_offload)()
        job.step()
        assert said == expected


def test_a_policy_that_nobody_plans_by_is_said_once(caplog):
    job = VirtualJob(1.0, policy={"kind": "auto"})
    for _ in range(3):
        job.step()
    (text,) = caplog.messages
    assert "call megatron_offload.autotune.loop.tune(manager)" in text
    assert job.moved_bytes[-1] > 0


def test_a_plan_that_someone_gives_is_followed_and_nothing_else(tmp_path, expected):
    job = VirtualJob(0.1)
    save_plan(expected, tmp_path / "plan.json")
    loop = settled(job)
    plan = load_plan(tmp_path / "plan.json")
    job.manager.follow_plan(plan)
    for _ in range(4):
        job.step()
    assert job.manager.learner.plan is plan
    assert loop.is_settled


def test_steps_that_fail_or_move_nothing_tell_nothing(expected):
    job = VirtualJob(0.1)
    loop = tune(job.manager)
    for number in range(60):
        if number % 3 == 1:
            with job.manager.staying("a test"):
                job.step()
        elif number % 3 == 2:
            with pytest.raises(ZeroDivisionError), job.manager.step():
                raise ZeroDivisionError
        else:
            job.step()
    assert loop.is_settled
    assert loop.plan.is_like(expected)


def test_a_step_that_a_user_profiles_meanwhile_is_no_hindrance(expected):
    job = VirtualJob(0.1)
    loop = tune(job.manager)
    job.step()
    job.step()
    with profile_step(job.manager) as recorded:
        job.step()
    assert recorded.profile.offloaded_bytes > 0
    assert settled(job) is loop
    assert loop.plan.is_like(expected)


def test_a_program_that_changes_for_good_is_looked_at_anew(log):
    job = VirtualJob(0.1)
    first = settled(job).plan
    shorter = [(action, number) for action, number in ORDER if number < 4]

    def step():
        run_step(job.model, job.manager, shorter)
        return job.manager.last_step.offloaded_bytes

    moved = [step() for _ in range(15)]
    loop = job.manager.tuner
    assert loop.is_settled
    assert "the program has changed" in log.text
    assert loop.plan.num_microbatches == 4 < first.num_microbatches
    # One odd step changes nothing.
    job.step()
    assert [step() for _ in range(4)][-1] == moved[-1]
    assert loop.is_settled


def test_a_new_configuration_is_a_new_run_and_a_new_manager_takes_the_loop_along():
    job = VirtualJob(0.1)
    loop = settled(job)
    job.manager.configure(job.manager.config.model_copy(), backend=job.backend)
    assert tune(job.manager) is loop
    job.moved_bytes.clear()
    job.step()
    assert (loop.is_settled, loop.plan) == (False, None)
    settled(job)
    assert loop.plan.moved_bytes > 0
    outer, PipelineOffloadManager.instance = PipelineOffloadManager.instance, job.manager
    try:
        PipelineOffloadManager.reset_instance()
        assert PipelineOffloadManager.get_instance().tuner is loop
        PipelineOffloadManager.get_instance().close()
    finally:
        PipelineOffloadManager.instance = outer
